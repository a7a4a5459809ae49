"""The bare prefix tree: nodes, walking, splitting, adding and removing. It knows nothing of tiers or slots.

Nodes hold whole pages; every border is a page border. A child is found by the bytes of its first page (below the root
also by its namespace), so that a lookup costs one dictionary access and one comparison of bytes per node, independent
of how many nodes there are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from .errors import InvariantError
from .token_key import TokenCodec
from .tree_node import KeyNamespace, TreeNode


@dataclass(frozen=True)
class Walk:
    """Where a key leads: `path` are the nodes matched whole, `num_tokens` their length.

    `partial` is the child of which only the first `partial_tokens` (whole pages, at least one) match, or None.
    """

    path: list[TreeNode]
    num_tokens: int
    partial: TreeNode | None
    partial_tokens: int


class RadixTree:
    """Nodes under one root. Not thread-safe: the scheduler thread owns it."""

    def __init__(self, codec: TokenCodec, num_components: int) -> None:
        self.codec = codec
        self._num_components = num_components
        self._next_id = 0
        self.num_nodes = 0
        self.root = self._new_node(None, KeyNamespace(None, 0), b"")

    def walk(self, namespace: KeyNamespace, key: bytes) -> Walk:
        """Follow `key` (whole pages) as far as it goes. Changes nothing."""
        node, offset = self.root, 0
        path: list[TreeNode] = []
        while offset < len(key):
            child = node.children.get(self._child_key(node, namespace, key, offset))
            if child is None:
                break
            end = offset + len(child.key)
            if key[offset:end] != child.key:
                shared = self._shared_tokens(child.key, key[offset:end])
                return Walk(path, offset // self.codec.token_bytes, child, shared)
            path.append(child)
            node, offset = child, end
        return Walk(path, offset // self.codec.token_bytes, None, 0)

    def add_child(self, parent: TreeNode, namespace: KeyNamespace, key: bytes) -> TreeNode:
        """Hang a new leaf with `key` (at least one page) below `parent`."""
        node = self._new_node(parent, namespace, key)
        parent.children[self._child_key(parent, namespace, key, 0)] = node
        return node

    def split(self, node: TreeNode, num_tokens: int) -> TreeNode:
        """Cut `node` after `num_tokens`; return the new upper part. `node` itself stays the lower part, so that whoever
        holds it still holds the end of the same prefix. The caller splits the components' data."""
        parent = node.parent
        if parent is None or not 0 < num_tokens < node.num_tokens:
            raise ValueError(f"cannot split {node!r} after {num_tokens} tokens")
        cut = num_tokens * self.codec.token_bytes
        slot = self._child_key(parent, node.namespace, node.key, 0)
        upper = self._new_node(parent, node.namespace, node.key[:cut])
        if node.page_keys is not None:
            num_pages = num_tokens // self.codec.page_size
            upper.page_keys, node.page_keys = node.page_keys[:num_pages], node.page_keys[num_pages:]
        parent.children[slot] = upper
        node.key = node.key[cut:]
        node.num_tokens -= num_tokens
        node.parent = upper
        upper.children[self._child_key(upper, node.namespace, node.key, 0)] = node
        return upper

    def remove(self, node: TreeNode) -> None:
        """Take a leaf out of the tree."""
        if node.children or node.parent is None:
            raise ValueError(f"only a leaf can be removed, not {node!r}")
        del node.parent.children[self._child_key(node.parent, node.namespace, node.key, 0)]
        node.parent = None
        self.num_nodes -= 1

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_invariants(self) -> None:
        """Links, keys and lengths agree; every node holds whole pages."""
        count = 0
        for node in self.nodes():
            count += 1
            if len(node.key) != node.num_tokens * self.codec.token_bytes or not node.num_tokens:
                raise InvariantError(f"{node!r} has a key of {len(node.key)} bytes")
            if node.num_tokens % self.codec.page_size:
                raise InvariantError(f"{node!r} does not hold whole pages")
            for child_key, child in node.children.items():
                if child.parent is not node:
                    raise InvariantError(
                        f"{child!r} hangs below {node!r} but names {child.parent!r}"
                    )
                if child_key != self._child_key(node, child.namespace, child.key, 0):
                    raise InvariantError(f"{child!r} is filed under a key that is not its own")
                if child.namespace != node.namespace:
                    raise InvariantError(f"{child!r} and its parent {node!r} differ in namespace")
        if count != self.num_nodes:
            raise InvariantError(f"{count} nodes are linked, {self.num_nodes} are counted")

    def _new_node(self, parent: TreeNode | None, namespace: KeyNamespace, key: bytes) -> TreeNode:
        num_tokens = len(key) // self.codec.token_bytes
        node = TreeNode(self._next_id, parent, namespace, key, num_tokens, self._num_components)
        self._next_id += 1
        self.num_nodes += parent is not None
        return node

    def _child_key(
        self, parent: TreeNode, namespace: KeyNamespace, key: bytes, offset: int
    ) -> Hashable:
        first_page = key[offset : offset + self.codec.page_bytes]
        return (namespace, first_page) if parent.parent is None else first_page

    def _shared_tokens(self, left: bytes, right: bytes) -> int:
        """Whole pages that two keys share from their start, in tokens."""
        size = min(len(left), len(right)) // 8
        differs = np.frombuffer(left, "<i8", size) != np.frombuffer(right, "<i8", size)
        same = int(differs.argmax()) if differs.any() else size
        return same * 8 // self.codec.page_bytes * self.codec.page_size
