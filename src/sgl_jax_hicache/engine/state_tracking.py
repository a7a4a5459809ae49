"""Which recurrent states a request's slots hold, and which copies its steps make.

A request has one running slot, which every step reads and writes, and track slots. The state is copied to a track slot
when it has consumed a multiple of `interval` tokens; the cache takes it from there. A request that starts behind a
reused prefix first gets the prefix's state copied into its running slot.
"""

from __future__ import annotations

from .fault import SchedulerFault
from .forward_batch import NO_STATES, StateSlots
from .req import Req


class StateTracking:
    """`interval` in tokens, a multiple of the page size; 0: nothing is tracked. `active` False: there are no states."""

    def __init__(self, *, active: bool, interval: int) -> None:
        self._active = active
        self._interval = interval

    def cut(self, prefix_len: int, seq_len: int) -> int:
        """Where a step from `prefix_len` towards `seq_len` must end at the latest, so that it crosses no border."""
        if self._interval == 0:
            return seq_len
        return min(seq_len, (prefix_len // self._interval + 1) * self._interval)

    def advance(self, req: Req, prefix_len: int, seq_len: int) -> StateSlots:
        """The slots of the step that computes tokens prefix_len .. seq_len-1; the request's record moves on with it.

        Raises SchedulerFault if no slot holds the state of exactly the first `prefix_len` tokens.
        """
        if not self._active:
            return NO_STATES
        cow_src, req.recurrent_cow_src_index = req.recurrent_cow_src_index, None
        if prefix_len and cow_src is None and req.recurrent_state_len != prefix_len:
            raise SchedulerFault(
                f"request {req.rid}: no state of its first {prefix_len} tokens; "
                f"its slot has consumed {req.recurrent_state_len}"
            )
        if not req.recurrent_pool_idx:
            raise SchedulerFault(f"request {req.rid} has no state slot")
        req.recurrent_state_len = seq_len
        source = cow_src if prefix_len and cow_src is not None else 0
        return StateSlots(req.recurrent_pool_idx, source, self._track_slot(req, seq_len))

    def _track_slot(self, req: Req, seq_len: int) -> int:
        slots = req.recurrent_ping_pong_track_buffer
        if self._interval == 0 or not slots or seq_len % self._interval:
            return 0
        index = req.recurrent_next_track_idx
        req.recurrent_next_track_idx = (index + 1) % len(slots)
        req.recurrent_last_track_seqlen = seq_len
        return slots[index]
