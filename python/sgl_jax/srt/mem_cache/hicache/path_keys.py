"""Storage keys of the pages on a path, hashed once and kept on the nodes."""

from __future__ import annotations

from collections.abc import Callable

from .page_key import PageHasher
from .tree_node import TreeNode
from .types import PageKey, PageLink


class PathKeys:
    """Keys of the Full pages, from which every other component derives its own. Scheduler thread only.

    `hasher_for` gives the page hasher of an extra_key.
    """

    def __init__(self, hasher_for: Callable[[str | None], PageHasher]) -> None:
        self._hasher_for = hasher_for
        self._hashers: dict[str | None, PageHasher] = {}

    def hasher(self, extra_key: str | None) -> PageHasher:
        """The page hasher of an extra_key."""
        if extra_key not in self._hashers:
            self._hashers[extra_key] = self._hasher_for(extra_key)
        return self._hashers[extra_key]

    def of_node(self, node: TreeNode) -> list[PageKey]:
        """Keys of the node's pages. Ancestors are hashed first, each node once."""
        missing = []
        for above in node.ancestors():
            if above.page_keys is not None:
                break
            missing.append(above)
        for above in reversed(missing):
            hasher = self.hasher(above.namespace.extra_key)
            above.page_keys = hasher.chain(self._parent_key(above), above.key)
        assert node.page_keys is not None
        return node.page_keys

    def links_of(self, node: TreeNode) -> list[PageLink]:
        """What each of the node's pages follows."""
        keys = self.of_node(node)
        first = sum(len(self.of_node(above)) for above in node.ancestors()) - len(keys)
        parents = [self._parent_key(node), *keys[:-1]]
        return [PageLink(parent, first + i) for i, parent in enumerate(parents)]

    def _parent_key(self, node: TreeNode) -> PageKey | None:
        """The key of the page before the node's first, or None at the start of a prompt."""
        parent = node.parent
        if parent is None or parent.parent is None:
            return None
        return self.of_node(parent)[-1]
