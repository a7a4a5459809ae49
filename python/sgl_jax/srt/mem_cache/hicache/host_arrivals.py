"""Makes room on the host for pages from storage, and hangs them into the tree when they have arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from .components.base import TreeComponent
from .tiered_tree import TieredTree
from .tree_node import KeyNamespace, TreeNode
from .types import ComponentKind, PageKey

Int32Array = npt.NDArray[np.int32]


class HostArrivals:
    """Host pages of one tree that come from storage. Scheduler thread only; waits for nothing."""

    def __init__(self, tree: TieredTree) -> None:
        self._tree = tree

    def host_share(self, share: float) -> int:
        """That share of the Full host pool, in pages."""
        return int(self._tree.tiers.host_pool(self._tree.full.kind).num_pages * share)

    def reserve(
        self, path: Sequence[TreeNode], needed: Mapping[ComponentKind, int]
    ) -> dict[ComponentKind, int]:
        """Evict until every component has as many free host pages as `needed`; how many each lacks all the same.

        The prefix itself is marked as used and does not make room for its own continuation.
        """
        tree = self._tree
        if path:
            tree.touch(path[-1])
        lacking: dict[ComponentKind, int] = {}
        with ExitStack() as pinned:
            for component in tree.components:
                own = [p for n in path if (p := component.data(n).host_pages) is not None]
                if own:
                    pages = np.concatenate(own)
                    tree.tiers.host_pool(component.kind).lock(pages)
                    pinned.callback(tree.tiers.controller.release, component.kind, pages)
            for kind, num_pages in needed.items():
                tree.make_host_room(tree.component(kind), num_pages)
                lacking[kind] = max(num_pages - tree.tiers.host_pool(kind).num_free, 0)
        return lacking

    def attach(
        self,
        namespace: KeyNamespace,
        key: bytes,
        component: TreeComponent,
        pages: Sequence[int],
        host_pages: Int32Array,
        page_keys: Mapping[int, PageKey],
    ) -> bool:
        """Put fetched pages of a prompt, numbered `pages` (ascending), into the tree. False if what they hang on is
        gone; pages that the tree does not take are given back."""
        if component is self._tree.full:
            return self._attach_full(namespace, key, pages, host_pages, page_keys)
        return self._attach_companion(namespace, key, component, pages, host_pages)

    def _attach_full(
        self,
        namespace: KeyNamespace,
        key: bytes,
        pages: Sequence[int],
        host_pages: Int32Array,
        page_keys: Mapping[int, PageKey],
    ) -> bool:
        tree, page_bytes = self._tree, self._tree.codec.page_bytes
        end = pages[-1] + 1
        path = tree.path_of(namespace, key[: end * page_bytes])
        have = sum(node.num_tokens for node in path) // tree.codec.page_size
        # Pages that came meanwhile may lie anywhere among these: what is new is told by its number.
        known = sum(page < have for page in pages)
        if len(pages) - known != end - have:
            tree.tiers.give_up(tree.full.kind, host_pages)
            return False
        tree.tiers.give_up(tree.full.kind, host_pages[:known])
        if have < end:
            parent = path[-1] if path else tree.tree.root
            node = tree.tree.add_child(parent, namespace, key[have * page_bytes : end * page_bytes])
            node.page_keys = [page_keys[page] for page in range(have, end)]
            tree.tiers.adopt(tree.full, node, host_pages[known:].copy())
            path.append(node)
        tree.touch(path[-1])
        return True

    def _attach_companion(
        self,
        namespace: KeyNamespace,
        key: bytes,
        component: TreeComponent,
        pages: Sequence[int],
        host_pages: Int32Array,
    ) -> bool:
        tree, page_size = self._tree, self._tree.codec.page_size
        end_tokens = (pages[-1] + 1) * page_size
        path = tree.path_of(namespace, key[: end_tokens * tree.codec.token_bytes])
        if sum(node.num_tokens for node in path) < end_tokens:
            tree.tiers.give_up(component.kind, host_pages)
            return False
        path = tree.cut_at(path, _run_borders(pages, page_size))
        place = dict(zip(pages, host_pages.tolist(), strict=True))
        start = 0
        for node in path:
            end = start + node.num_tokens // page_size
            run_start, run_end = component.run_of(start, end)
            start = end
            run = range(run_start, run_end)
            if component.data(node).host_pages is None and all(page in place for page in run):
                component.data(node).kept = True
                taken = np.array([place.pop(page) for page in run], np.int32)
                tree.tiers.adopt(component, node, taken)
        tree.tiers.give_up(component.kind, np.array(list(place.values()), np.int32))
        tree.touch(path[-1])
        return True


def _run_borders(pages: Sequence[int], page_size: int) -> list[int]:
    """Where runs of neighbouring pages begin and end, in tokens; ascending, without 0."""
    borders: set[int] = set()
    for page in pages:
        borders ^= {page, page + 1}
    return [border * page_size for border in sorted(borders) if border]
