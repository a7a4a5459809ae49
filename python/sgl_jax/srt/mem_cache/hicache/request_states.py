"""Takes over the snapshots that the engine made of a running request's recurrent state."""

from __future__ import annotations

from typing import Any

from .device_eviction import DeviceEviction
from .tiered_tree import TieredTree


class RequestStates:
    """Snapshots between requests and one tree. Scheduler thread only."""

    def __init__(self, tree: TieredTree, eviction: DeviceEviction) -> None:
        self._tree = tree
        self._eviction = eviction

    def hand_over(self, req: Any, num_tokens: int) -> list[tuple[int, int]]:
        """The request's last snapshot, if it lies within its first `num_tokens` tokens, as (tokens consumed, slot).

        The slot is the caller's from now on; the request gets another in its place. Without one to give, the request
        keeps its snapshot and nothing is handed over.
        """
        tree = self._tree
        if tree.recurrent is None or not getattr(req, "recurrent_ping_pong_track_buffer", None):
            return []
        num_consumed = req.recurrent_last_track_seqlen or 0  # None: there was no snapshot yet
        if not 0 < num_consumed <= num_tokens or num_consumed % tree.codec.page_size:
            return []
        replacement = self._new_slot(req.dp_rank or 0)
        if replacement is None:
            return []
        slots = req.recurrent_ping_pong_track_buffer
        # With two slots the engine writes the next snapshot to the other one.
        kept = (req.recurrent_next_track_idx + 1) % len(slots)
        slot, slots[kept] = slots[kept], replacement
        req.recurrent_last_track_seqlen = 0
        return [(num_consumed, slot)]

    def _new_slot(self, dp_rank: int) -> int | None:
        device = self._tree.device
        slot = device.alloc_state(dp_rank)
        if slot is None and self._eviction.evict_states(1, dp_rank):
            slot = device.alloc_state(dp_rank)
        return slot
