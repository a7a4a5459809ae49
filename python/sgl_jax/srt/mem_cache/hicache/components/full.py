"""Full attention (MHA, GQA, MLA): every token of a prefix is needed, so every page of it must be there.

It is on every tree, and its slots are the names of the tokens. F1: every node is on the device or on the host. F2: the
nodes on the device form a prefix of every path (a device node's parent is on the device). F3: device locks are taken
along the whole path, so a parent's lock is at least each child's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import InvariantError
from ..tree_node import TreeNode
from ..types import ComponentKind
from .base import PagedComponent


class FullComponent(PagedComponent):
    """The Full part of every node."""

    kind = ComponentKind.FULL

    def __init__(self, **settings: Any) -> None:
        super().__init__(index=0, reach=None, **settings)

    def wants_host_copy(self, node: TreeNode) -> bool:
        """Always."""
        return True

    def useless_without(self, node: TreeNode) -> Sequence[TreeNode]:
        """The whole path: a page is of use only with those above it."""
        return node.path()

    def needed_nodes(self, path: Sequence[TreeNode]) -> Sequence[TreeNode]:
        """All of them."""
        return path

    def check_node(self, node: TreeNode) -> None:
        """F1 to F3."""
        data = self.data(node)
        if data.device_slots is None and data.host_pages is None:
            raise InvariantError(f"F1: {node!r} is on no tier")
        parent = node.parent
        if parent is None or parent.parent is None:
            return
        above = self.data(parent)
        if data.device_slots is not None and above.device_slots is None:
            raise InvariantError(f"F2: {node!r} is on the device, its parent {parent!r} is not")
        if data.device_lock > above.device_lock:
            raise InvariantError(f"F3: {node!r} is locked more often than its parent")
