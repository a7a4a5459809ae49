"""Hands out the slots of a model with sliding layers: for a token one of the full pool, and one of the SWA pool.

Callers hold full slots only. `full_to_swa_index_mapping` (see `swa_kv_pool.py`) is the whole truth about the other
pool, so a cache may map pages that it took from `swa_attn_allocator` by writing there. Pages are mapped whole and keep
the offset inside the page. Sizes are in tokens, slots rank-local int32. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .allocator import Int32Array, PagedTokenToKVPoolAllocator, SlotStateError
from .swa_kv_pool import SWAKVPool


class SWATokenToKVPoolAllocator:
    """Two page allocators over one SWAKVPool; every allocation takes as many pages from both, or nothing."""

    def __init__(self, size: int, size_swa: int, page_size: int, kvcache: SWAKVPool) -> None:
        if len(kvcache.full_to_swa_index_mapping) != size + page_size:
            raise ValueError(f"the mapping of the pool is not made for {size} tokens")
        self.size = size
        self.size_swa = size_swa
        self.page_size = page_size
        self.dp_size = 1
        self._kvcache = kvcache
        self._offsets = np.arange(page_size, dtype=np.int32)
        self.full_attn_allocator = PagedTokenToKVPoolAllocator(
            size, page_size, kvcache.full_kv_pool
        )
        self.swa_attn_allocator = PagedTokenToKVPoolAllocator(
            size_swa, page_size, kvcache.swa_kv_pool
        )
        self.full_to_swa_index_mapping = kvcache.full_to_swa_index_mapping
        # The same memory, one row per page of the full pool.
        self._rows = self.full_to_swa_index_mapping.reshape(-1, page_size)

    @property
    def size_per_rank(self) -> int:
        """Usable tokens of the full pool of one data-parallel rank; there is one rank."""
        return self.size

    @property
    def swa_size_per_rank(self) -> int:
        """Usable tokens of the SWA pool of one data-parallel rank; there is one rank."""
        return self.size_swa

    @property
    def pages_per_rank(self) -> int:
        """Usable pages of the full pool of one data-parallel rank; there is one rank."""
        return self.size // self.page_size

    def get_kvcache(self) -> SWAKVPool:
        """The device pools whose slots these are."""
        return self._kvcache

    def full_available_size(self, dp_rank: int = 0) -> int:
        """Free tokens of the full pool."""
        return self.full_attn_allocator.available_size(dp_rank)

    def swa_available_size(self, dp_rank: int = 0) -> int:
        """Free tokens of the SWA pool."""
        return self.swa_attn_allocator.available_size(dp_rank)

    def available_size(self, dp_rank: int = 0) -> int:
        """Tokens that `alloc` could give: the less of both pools."""
        return min(self.full_available_size(dp_rank), self.swa_available_size(dp_rank))

    def clear(self, dp_rank: int | None = None) -> None:
        """Take every page of both pools back and unmap all."""
        self.full_attn_allocator.clear(dp_rank)
        self.swa_attn_allocator.clear(dp_rank)
        self.full_to_swa_index_mapping[:] = 0

    def alloc(self, need_size: int, dp_rank: int = 0) -> Int32Array | None:
        """int32[need_size] full slots in whole pages, mapped; None with nothing changed."""
        if need_size > self.available_size(dp_rank):
            return None
        full = self.full_attn_allocator.alloc(need_size, dp_rank)
        return self._mapped(full, self.swa_attn_allocator.alloc(need_size, dp_rank))

    def alloc_extend(
        self,
        prefix_lens: Sequence[int],
        seq_lens: Sequence[int],
        last_loc: Sequence[int],
        extend_num_tokens: int,
        dp_rank: int = 0,
    ) -> Int32Array | None:
        """As of `PagedTokenToKVPoolAllocator`, from both pools; None with nothing changed in either.

        Raises SlotStateError for a half filled page that is not mapped any more.
        """
        need = self.full_attn_allocator.growth(prefix_lens, seq_lens)
        if need > self.available_size(dp_rank):
            return None  # before anything is taken, so that there is nothing to give back
        swa_last_loc = [
            self._swa_slot(slot) if prefix % self.page_size and prefix < seq else 0
            for prefix, seq, slot in zip(prefix_lens, seq_lens, last_loc, strict=True)
        ]
        full = self.full_attn_allocator.alloc_extend(
            prefix_lens, seq_lens, last_loc, extend_num_tokens, dp_rank
        )
        swa = self.swa_attn_allocator.alloc_extend(
            prefix_lens, seq_lens, swa_last_loc, extend_num_tokens, dp_rank
        )
        return self._mapped(full, swa)

    def alloc_decode(
        self, seq_lens: Sequence[int], last_loc: Sequence[int], dp_rank: int = 0
    ) -> Int32Array | None:
        """One slot per sequence for its token seq_lens[i]-1, or None with nothing changed."""
        prefix_lens = [seq_len - 1 for seq_len in seq_lens]
        return self.alloc_extend(prefix_lens, seq_lens, last_loc, len(prefix_lens), dp_rank)

    def free(self, free_index: Int32Array, dp_rank: int = 0) -> None:
        """Give back every full page that one of these slots lies in, and what it is mapped to.

        Raises SlotStateError, with nothing changed, if one of them is not handed out.
        """
        self.full_attn_allocator.free(free_index, dp_rank)
        self.free_swa(free_index, dp_rank)

    def free_swa(self, free_index: Int32Array, dp_rank: int = 0) -> None:
        """Unmap these slots' full pages and give back the SWA pages; nothing happens to pages that are not mapped."""
        pages = np.unique(np.asarray(free_index) // self.page_size)
        mapped = pages[self._rows[pages, 0] > 0]
        self.swa_attn_allocator.free(self._rows[mapped, 0], dp_rank)
        self._rows[mapped] = 0

    def free_group_begin(self) -> None:
        """Defer the return of both pools' pages until the matching end; unmapping is at once."""
        self.full_attn_allocator.free_group_begin()
        self.swa_attn_allocator.free_group_begin()

    def free_group_end(self) -> None:
        """Make available what was freed since the matching begin."""
        self.full_attn_allocator.free_group_end()
        self.swa_attn_allocator.free_group_end()

    def check_invariants(self) -> None:
        """Raise SlotStateError unless mapped full pages and handed out SWA pages are the same, one to one."""
        self.full_attn_allocator.check_invariants()
        self.swa_attn_allocator.check_invariants()
        mapped = np.flatnonzero(self._rows.any(axis=1))
        starts = self._rows[mapped, 0]
        if np.any(starts % self.page_size) or np.any(
            self._rows[mapped] != starts[:, None] + self._offsets
        ):
            raise SlotStateError("a page is mapped in part, or not to one page")
        swa_pages = np.sort(starts // self.page_size)
        if not np.array_equal(swa_pages, self.swa_attn_allocator.owned_pages()):
            raise SlotStateError("mapped and handed out SWA pages differ")
        stray = np.setdiff1d(mapped, self.full_attn_allocator.owned_pages())
        if len(stray):
            raise SlotStateError(f"full pages {stray.tolist()} are mapped but not handed out")

    def _swa_slot(self, full_slot: int) -> int:
        slot = int(self.full_to_swa_index_mapping[full_slot])
        if slot == 0:
            raise SlotStateError(f"slot {full_slot} ends a half filled page without an SWA page")
        return slot

    def _mapped(self, full: Int32Array | None, swa: Int32Array | None) -> Int32Array:
        if full is None or swa is None:
            raise SlotStateError("a pool refuses pages that it said are free")
        # New pages are those whose first slot is among the new slots.
        first = full % self.page_size == 0
        self._rows[full[first] // self.page_size] = swa[first][:, None] + self._offsets
        return full


TokenAllocator = PagedTokenToKVPoolAllocator | SWATokenToKVPoolAllocator
