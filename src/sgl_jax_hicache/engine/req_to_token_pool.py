"""The table of running requests: which token slot holds token i of request r."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class ReqToTokenPool:
    """`req_to_token` int32[size, max_context_len]; a row belongs to one running request from `alloc` to `free`.

    Rows are read by copy: a dispatched step never sees a later change. Scheduler thread only.
    """

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

    def alloc_recurrent_slot(self, dp_rank: int = 0) -> int | None:
        """A slot of the recurrent state pool for one request, None if all are taken; here the dummy, 0."""
        return 0

    def free_recurrent_slot(self, slot: int, dp_rank: int = 0) -> None:
        """Give back what `alloc_recurrent_slot` gave."""

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
    """Rows, and slots 1 .. recurrent_slots of a recurrent state pool; a slot belongs to one request at a time."""

    def __init__(self, size: int, max_context_len: int, recurrent_slots: int) -> None:
        if recurrent_slots < size:
            raise ValueError(f"{recurrent_slots} state slots are too few for {size} requests")
        self.slots_per_rank = recurrent_slots
        super().__init__(size, max_context_len)

    def clear(self) -> None:
        """Take every row and every slot back."""
        super().clear()
        self.recurrent_free_slots = [list(range(self.slots_per_rank, 0, -1))]

    def recurrent_available_size(self, dp_rank: int = 0) -> int:
        """Free state slots."""
        return len(self.recurrent_free_slots[dp_rank])

    def held(self) -> str | None:
        """None if neither rows nor slots are taken; else what is, in words."""
        slots = self.slots_per_rank - self.recurrent_available_size()
        return super().held() or (f"{slots} state slots are still held" if slots else None)

    def alloc_recurrent_slot(self, dp_rank: int = 0) -> int | None:
        """A slot, or None if all are taken."""
        free = self.recurrent_free_slots[dp_rank]
        return free.pop() if free else None

    def free_recurrent_slot(self, slot: int, dp_rank: int = 0) -> None:
        """Give a slot back. Raises ValueError if it is free already or does not exist."""
        free = self.recurrent_free_slots[dp_rank]
        if not 1 <= slot <= self.slots_per_rank or slot in free:
            raise ValueError(f"state slot {slot} is not in use (of {self.slots_per_rank})")
        free.append(slot)
