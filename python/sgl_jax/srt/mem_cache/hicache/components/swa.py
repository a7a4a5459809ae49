"""Sliding-window attention: a reader needs the last `window` tokens before the border, and nothing before them.

S1: a node with SWA slots has Full slots too (the engine maps the one to the other). On the device a node may have Full
slots only: its window was freed (a tombstone). Host copies are made of the windows before checkpoints, the borders at
every multiple of `interval`, and before the end of a prompt or answer, so that a later prompt that leaves a cached one
in the middle finds a border it can resume at. With an interval within the window that is every page.

The end keeps one page more than a window: a prompt of whole pages that is asked again must leave its last token to be
computed, so it resumes at the border before its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import InvariantError
from ..tree_node import TreeNode
from ..types import ComponentKind
from .base import PagedComponent


class SWAComponent(PagedComponent):
    """The sliding-window part of a node. `window` and `interval` are in tokens, `interval` in whole pages."""

    kind = ComponentKind.SWA

    def __init__(
        self, *, index: int, page_size: int, window: int, interval: int, **settings: Any
    ) -> None:
        # The token at a border sees itself and the window - 1 tokens before it.
        reach = -(-(window - 1) // page_size)
        super().__init__(index=index, page_size=page_size, reach=reach, **settings)
        self._reach_tokens = reach * page_size
        self._tail_tokens = self._reach_tokens + page_size if reach else 0
        self._interval = interval

    def keep_borders(self, num_tokens: int, tail: bool) -> list[int]:
        """Where, in a prefix of `num_tokens` tokens, begins or ends what is to be kept; ascending, not 0."""
        borders: set[int] = set()
        if self._interval > self._reach_tokens:
            for checkpoint in range(self._interval, num_tokens + self._interval, self._interval):
                borders.update((checkpoint - self._reach_tokens, checkpoint))
        if tail:
            borders.add(num_tokens - self._tail_tokens)
        return sorted(border for border in borders if 0 < border < num_tokens)

    def keep(self, node: TreeNode, start: int, num_tokens: int, tail: bool) -> None:
        """Mark a node, which begins at token `start` of a prefix cut at `keep_borders`, if it is to be kept."""
        to_checkpoint = self._interval - start % self._interval
        in_tail = tail and start >= num_tokens - self._tail_tokens
        if in_tail or to_checkpoint <= self._reach_tokens:
            self.data(node).kept = True

    def wants_host_copy(self, node: TreeNode) -> bool:
        """Windows before checkpoints and ends."""
        return self.data(node).kept

    def useless_without(self, node: TreeNode) -> Sequence[TreeNode]:
        """The node by itself; the rest of its window is written when its own copy is complete."""
        return (node,)

    def needed_nodes(self, path: Sequence[TreeNode]) -> Sequence[TreeNode]:
        """Those of the last window."""
        return list(self.readers_nodes(path[-1]))[::-1] if path else []

    def check_node(self, node: TreeNode) -> None:
        """S1."""
        if self.data(node).device_slots is not None and node.data[0].device_slots is None:
            raise InvariantError(f"S1: {node!r} has SWA slots, but no Full slots")
