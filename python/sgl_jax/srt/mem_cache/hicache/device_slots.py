"""Device slots of every kind, as the engine's allocators hand them out.

Full slots come from the token allocator. With a sliding-window pool beside the full one the allocator keeps both, and
one table maps Full slots to SWA slots (0: not mapped), page by page with equal offsets; it is changed in place and
freeing Full slots frees what is mapped to them. State slots come from the request table. Scheduler thread only; all
slots are rank-local int32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class DeviceSlots:
    """The engine's allocators under one roof: a `TokenToKVPoolAllocator`, with `has_swa` one with the two allocators
    of full and sliding attention in it, and a `ReqToTokenPool` that, with recurrent states, hands out their slots."""

    def __init__(
        self,
        allocator: Any,
        req_to_token_pool: Any,
        *,
        has_swa: bool = False,
    ) -> None:
        self._allocator = allocator
        self._rows = req_to_token_pool
        self._full: Any = self._allocator.full_attn_allocator if has_swa else self._allocator
        self._swa: Any = self._allocator.swa_attn_allocator if has_swa else None

    # -- Full --------------------------------------------------------------------------------------------------------

    def full_available(self, dp_rank: int) -> int:
        """Free Full tokens."""
        return int(self._full.available_size(dp_rank=dp_rank))

    def alloc_full(self, num_tokens: int, dp_rank: int) -> Int32Array | None:
        """Full slots in whole pages with no SWA slots mapped to them; None with nothing changed."""
        slots: Int32Array | None = self._full.alloc(num_tokens, dp_rank=dp_rank)
        return slots

    def free_full(self, full_slots: Int32Array, dp_rank: int) -> None:
        """Give back Full slots and the SWA slots that are mapped to them."""
        if len(full_slots):
            self._allocator.free(full_slots, dp_rank=dp_rank)

    # -- SWA ---------------------------------------------------------------------------------------------------------

    def swa_available(self, dp_rank: int) -> int:
        """Free SWA tokens."""
        return int(self._swa.available_size(dp_rank=dp_rank))

    def swa_of(self, full_slots: Int32Array, dp_rank: int) -> Int32Array:
        """int32[n] SWA slots mapped to Full slots, 0 where none is; a copy."""
        mapped: Int32Array = self._mapping(dp_rank)[full_slots]
        return mapped

    def alloc_swa(self, num_tokens: int, dp_rank: int) -> Int32Array | None:
        """SWA slots in whole pages that nothing is mapped to; None with nothing changed."""
        slots: Int32Array | None = self._swa.alloc(num_tokens, dp_rank=dp_rank)
        return slots

    def map_swa(self, full_slots: Int32Array, swa_slots: Int32Array, dp_rank: int) -> None:
        """Map Full slots, which have no SWA slots, to these."""
        self._mapping(dp_rank)[full_slots] = swa_slots

    def move_swa(self, source: Int32Array, target: Int32Array, dp_rank: int) -> None:
        """The SWA slots of the Full slots `source` become those of `target`, which has none."""
        mapping = self._mapping(dp_rank)
        mapping[target] = mapping[source]
        mapping[source] = 0

    def free_swa(self, full_slots: Int32Array, dp_rank: int) -> None:
        """Give back the SWA slots mapped to these Full slots, which stay."""
        if len(full_slots):
            self._allocator.free_swa(full_slots, dp_rank=dp_rank)

    def give_back_swa(self, swa_slots: Int32Array, dp_rank: int) -> None:
        """Give back SWA slots that were never mapped."""
        if len(swa_slots):
            self._swa.free(swa_slots, dp_rank=dp_rank)

    # -- states ------------------------------------------------------------------------------------------------------

    def states_available(self, dp_rank: int) -> int:
        """Free state slots."""
        return int(self._rows.recurrent_available_size(dp_rank))

    def alloc_state(self, dp_rank: int) -> int | None:
        """A state slot, or None."""
        slot = self._rows.alloc_recurrent_slot(dp_rank)
        return None if slot is None else int(slot)

    def free_state(self, slot: int, dp_rank: int) -> None:
        """Give a state slot back."""
        self._rows.free_recurrent_slot(int(slot), dp_rank)

    def _mapping(self, dp_rank: int) -> Int32Array:
        mapping = self._allocator.full_to_swa_index_mapping
        chosen: Int32Array = mapping[dp_rank] if isinstance(mapping, list) else mapping
        return chosen
