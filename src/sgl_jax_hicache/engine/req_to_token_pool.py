"""The table of running requests: which token slot holds token i of request r."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class StateHolder(Protocol):
    """What the pool writes on a request; see `req.py`."""

    dp_rank: int
    recurrent_pool_idx: int
    recurrent_ping_pong_track_buffer: list[int]


class ReqToTokenPool:
    """`req_to_token` int32[size, max_context_len]; a row belongs to one running request from `alloc` to `free`.

    Rows are read by copy: a dispatched step never sees a later change. Scheduler thread only.
    """

    # Slots of the recurrent state pool: all, those that one request takes, and how many of these are track slots.
    slots_per_rank = 0
    request_owned_slots = 0
    track_slots = 0

    def __init__(self, size: int, max_context_len: int) -> None:
        self.size = size
        self.max_context_len = max_context_len
        self.req_to_token: Int32Array = np.zeros((size, max_context_len), dtype=np.int32)
        self.clear()

    def clear(self) -> None:
        """Take every row back."""
        self.free_slots = list(range(self.size - 1, -1, -1))

    def available_size(self) -> int:
        """Free rows."""
        return len(self.free_slots)

    def held(self) -> str | None:
        """None if nothing is taken; else what is, in words."""
        rows = self.size - self.available_size()
        return f"{rows} request rows are still held" if rows else None

    def alloc(self, need_size: int = 1) -> list[int] | None:
        """`need_size` row indices, or None with nothing changed."""
        if need_size > len(self.free_slots):
            return None
        return [self.free_slots.pop() for _ in range(need_size)]

    def free(self, free_index: int | Iterable[int]) -> None:
        """Give rows back. Raises ValueError if one is free already or does not exist."""
        rows = [free_index] if isinstance(free_index, int) else list(free_index)
        for row in rows:
            if not 0 <= row < self.size or row in self.free_slots:
                raise ValueError(f"request row {row} is not in use (of {self.size})")
            self.free_slots.append(row)

    def recurrent_available_size(self, dp_rank: int = 0) -> int:
        """Free state slots."""
        return 0

    def alloc_states(self, req: StateHolder) -> bool:
        """Give the request its state slots; False with nothing changed if they are not to be had."""
        return True

    def free_states(self, req: StateHolder) -> None:
        """Take back the state slots that the request lists."""

    def write(self, indices: Any, values: Int32Array) -> None:
        """`req_to_token[indices] = values`."""
        self.req_to_token[indices] = values

    def read(self, row: int, length: int) -> Int32Array:
        """A copy of the first `length` slots of a row."""
        return self.req_to_token[row, :length].copy()

    def page_table(self, row: int, length: int, page_size: int) -> Int32Array:
        """int32[ceil(length / page_size)] pages of the first `length` tokens, freshly made."""
        return self.req_to_token[row, :length:page_size] // np.int32(page_size)


class HybridReqToTokenPool(ReqToTokenPool):
    """Rows, and slots 1 .. recurrent_slots of a recurrent state pool, each in one hand at a time.

    A request takes a running slot and `track_slots` more; the cache takes and gives single slots for what it keeps.
    """

    def __init__(
        self, size: int, max_context_len: int, recurrent_slots: int, track_slots: int = 0
    ) -> None:
        self.track_slots = track_slots
        self.request_owned_slots = 1 + track_slots
        if recurrent_slots < size * self.request_owned_slots:
            raise ValueError(
                f"{recurrent_slots} state slots are too few for {size} requests "
                f"with {self.request_owned_slots} each"
            )
        self.slots_per_rank = recurrent_slots
        super().__init__(size, max_context_len)

    def clear(self) -> None:
        """Take every row and every slot back."""
        super().clear()
        self.recurrent_free_slots = [list(range(self.slots_per_rank, 0, -1))]
        self._is_free = [False] + [True] * self.slots_per_rank

    def recurrent_available_size(self, dp_rank: int = 0) -> int:
        """Free state slots."""
        return len(self.recurrent_free_slots[dp_rank])

    def alloc_recurrent_slot(self, dp_rank: int = 0) -> int | None:
        """A slot, or None if all are taken."""
        free = self.recurrent_free_slots[dp_rank]
        if not free:
            return None
        slot = free.pop()
        self._is_free[slot] = False
        return slot

    def free_recurrent_slot(self, slot: int, dp_rank: int = 0) -> None:
        """Give a slot back. Raises ValueError if it is free already or does not exist."""
        if not 1 <= slot <= self.slots_per_rank or self._is_free[slot]:
            raise ValueError(f"state slot {slot} is not in use (of {self.slots_per_rank})")
        self._is_free[slot] = True
        self.recurrent_free_slots[dp_rank].append(slot)

    def alloc_states(self, req: StateHolder) -> bool:
        """Give the request a running slot and its track slots; False with nothing changed if they are not to be had."""
        if self.recurrent_available_size(req.dp_rank) < self.request_owned_slots:
            return False
        slots = [self._take(req.dp_rank) for _ in range(self.request_owned_slots)]
        req.recurrent_pool_idx, *req.recurrent_ping_pong_track_buffer = slots
        return True

    def free_states(self, req: StateHolder) -> None:
        """Take back the running slot and the track slots that the request lists."""
        listed = [req.recurrent_pool_idx, *req.recurrent_ping_pong_track_buffer]
        req.recurrent_pool_idx, req.recurrent_ping_pong_track_buffer = 0, []
        for slot in listed:
            if slot:
                self.free_recurrent_slot(slot, req.dp_rank)

    def _take(self, dp_rank: int) -> int:
        slot = self.alloc_recurrent_slot(dp_rank)
        assert slot is not None
        return slot
