"""Recurrent layers (gated delta rule and its kin): a reader needs one state, that after exactly the prefix's tokens.

A node may have the state at its end. R1: a node with a state on the device has Full slots too. Slots, host pages and
files of this component are states, not tokens. States exist at the borders where the engine took a snapshot, at every
multiple of `interval` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import InvariantError
from ..tree_node import TreeNode
from ..types import ComponentKind
from .base import Int32Array, TreeComponent


class RecurrentStateComponent(TreeComponent):
    """The recurrent part of a node. `interval`: tokens between the borders that may have a state, in whole pages."""

    kind = ComponentKind.RECURRENT

    def __init__(self, *, index: int, page_size: int, interval: int, **settings: Any) -> None:
        super().__init__(index=index, page_size=page_size, reach=1, **settings)
        self._interval_pages = interval // page_size

    def device_pages_of(self, device_slots: Int32Array) -> Int32Array:
        """A state slot is a row."""
        return device_slots

    def num_slots(self, node: TreeNode) -> int:
        """One state."""
        return 1

    def wants_host_copy(self, node: TreeNode) -> bool:
        """Always: a state on a node is at a checkpoint."""
        return True

    def useless_without(self, node: TreeNode) -> Sequence[TreeNode]:
        """A state stands for itself."""
        return (node,)

    def needed_nodes(self, path: Sequence[TreeNode]) -> Sequence[TreeNode]:
        """The last one."""
        return path[-1:]

    def readers_nodes(self, node: TreeNode) -> Sequence[TreeNode]:
        """The node itself; the root has no state."""
        return () if node.parent is None else (node,)

    def run_of(self, start: int, end: int) -> tuple[int, int]:
        """A state says something about the node's last page only."""
        return end - 1, end

    def first_page_in(self, node: TreeNode) -> int:
        """The last page, whose border the state belongs to."""
        return node.num_tokens // self._page_size - 1

    def storage_candidates(self, first: int, end: int) -> range:
        """The pages that end at a multiple of the interval."""
        step = self._interval_pages
        return range(-(-(first + 1) // step) * step - 1, end, step)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """The state stays at the end, with `lower`, and so do its locks."""

    def check_node(self, node: TreeNode) -> None:
        """R1."""
        if self.data(node).device_slots is not None and node.data[0].device_slots is None:
            raise InvariantError(f"R1: {node!r} has a state on the device, but no Full slots")
