"""Hands out token slots of the device KV pool, in whole pages.

Sizes are in tokens, indices rank-local int32 token slots (slot = page * page_size + offset). Page 0 is the sentinel
that padding points at; it is never handed out. Only the scheduler thread calls it.

A page is FREE, OWNED or, inside a free group, PENDING (given back, not yet available). Freeing a page that is not OWNED
is a fault of the caller and raises: the same page in two hands is silently wrong output later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

_FREE, _OWNED, _PENDING = 0, 1, 2


class SlotStateError(Exception):
    """A slot was freed twice, freed while not handed out, or lies outside the pool."""


class PagedTokenToKVPoolAllocator:
    """A stack of free pages over a pool of `size` token slots (without the sentinel page); page_size 1 is allowed.

    Allocation and release cost O(pages moved), whatever the size of the pool.
    """

    def __init__(self, size: int, page_size: int, kvcache: Any) -> None:
        """`size`: usable tokens, a multiple of `page_size`; `kvcache`: the device pool these slots belong to."""
        if page_size < 1 or size < page_size or size % page_size:
            raise ValueError(
                f"pool size {size} must be a positive multiple of page_size {page_size}"
            )
        self.size = size
        self.page_size = page_size
        self.dp_size = 1
        self._kvcache = kvcache
        self._offsets = np.arange(page_size, dtype=np.int32)
        self.clear()

    @property
    def num_pages(self) -> int:
        """Usable pages, without the sentinel."""
        return self.size // self.page_size

    @property
    def size_per_rank(self) -> int:
        """Usable tokens of one data-parallel rank; there is one rank."""
        return self.size

    @property
    def pages_per_rank(self) -> int:
        """Usable pages of one data-parallel rank; there is one rank."""
        return self.num_pages

    def get_kvcache(self) -> Any:
        """The device pool whose slots these are."""
        return self._kvcache

    def clear(self, dp_rank: int | None = None) -> None:
        """Take every page back, whoever holds it. The next allocations run from page 1 upwards."""
        self._stack: Int32Array = np.arange(self.num_pages, 0, -1, dtype=np.int32)
        self._top = self.num_pages
        self._state = np.full(self.num_pages + 1, _FREE, dtype=np.uint8)
        self._pending: list[Int32Array] = []
        self._group_depth = 0

    def available_size(self, dp_rank: int = 0) -> int:
        """Free tokens; pages given back inside an open free group do not count yet."""
        return self._top * self.page_size

    def alloc(self, need_size: int, dp_rank: int = 0) -> Int32Array | None:
        """int32[need_size] slots in whole pages, or None with nothing changed. `need_size` % page_size must be 0."""
        if need_size < 0 or need_size % self.page_size:
            raise ValueError(f"alloc of {need_size} tokens: not a multiple of {self.page_size}")
        pages = self._take(need_size // self.page_size)
        return None if pages is None else self._slots(pages)

    def alloc_extend(
        self,
        prefix_lens: Sequence[int],
        seq_lens: Sequence[int],
        last_loc: Sequence[int],
        extend_num_tokens: int,
        dp_rank: int = 0,
    ) -> Int32Array | None:
        """Slots for tokens prefix_lens[i] .. seq_lens[i]-1 of each sequence, one after the other.

        `last_loc[i]` is the slot of token prefix_lens[i]-1 (ignored when the prefix ends on a page border): a half
        filled page is filled first. int32[extend_num_tokens], or None with nothing changed.
        """
        spans = list(zip(prefix_lens, seq_lens, last_loc, strict=True))
        if sum(seq - prefix for prefix, seq, _ in spans) != extend_num_tokens:
            raise ValueError(f"extend_num_tokens {extend_num_tokens} is not the sum of the spans")
        wanted = [self._pages_to_grow(prefix, seq) for prefix, seq, _ in spans]
        pages = self._take(sum(wanted))
        if pages is None:
            return None
        out: list[Int32Array] = []
        start = 0
        for (prefix, seq, last), num_pages in zip(spans, wanted, strict=True):
            out.append(self._extend_one(prefix, seq, last, pages[start : start + num_pages]))
            start += num_pages
        return np.concatenate(out) if out else np.empty(0, dtype=np.int32)

    def alloc_decode(
        self, seq_lens: Sequence[int], last_loc: Sequence[int], dp_rank: int = 0
    ) -> Int32Array | None:
        """One slot per sequence for its token seq_lens[i]-1, or None with nothing changed."""
        prefix_lens = [seq_len - 1 for seq_len in seq_lens]
        return self.alloc_extend(prefix_lens, seq_lens, last_loc, len(prefix_lens), dp_rank)

    def free(self, free_index: Int32Array, dp_rank: int = 0) -> None:
        """Give back every page that one of these slots lies in.

        Raises SlotStateError, with nothing changed, if one of them is not handed out.
        """
        if len(free_index) == 0:
            return
        pages = _pages_of(np.asarray(free_index), self.page_size)
        if pages[0] < 1 or pages[-1] > self.num_pages:
            raise SlotStateError(f"pages {pages.tolist()} outside [1, {self.num_pages}]")
        bad = pages[self._state[pages] != _OWNED]
        if len(bad):
            raise SlotStateError(f"pages {bad.tolist()} are freed but not handed out")
        if self._group_depth:
            self._state[pages] = _PENDING
            self._pending.append(pages)
        else:
            self._put(pages)

    def free_group_begin(self) -> None:
        """Defer every `free` until the matching `free_group_end`."""
        self._group_depth += 1

    def free_group_end(self) -> None:
        """Make available what was freed since the matching begin."""
        if self._group_depth == 0:
            raise SlotStateError("free_group_end without free_group_begin")
        self._group_depth -= 1
        if self._group_depth == 0:
            pending, self._pending = self._pending, []
            for pages in pending:
                self._put(pages)

    def growth(self, prefix_lens: Sequence[int], seq_lens: Sequence[int]) -> int:
        """Tokens, in whole pages, that `alloc_extend` would take."""
        pairs = zip(prefix_lens, seq_lens, strict=True)
        return self.page_size * sum(self._pages_to_grow(prefix, seq) for prefix, seq in pairs)

    def free_pages(self) -> Int32Array:
        """A copy of the free page ids, for checks."""
        return self._stack[: self._top].copy()

    def owned_pages(self) -> Int32Array:
        """The ids of all pages that are handed out, ascending, for checks."""
        return np.flatnonzero(self._state == _OWNED).astype(np.int32)

    def check_invariants(self) -> None:
        """Raise SlotStateError unless the free stack and the page states tell the same story."""
        stack = self._stack[: self._top]
        if len(np.unique(stack)) != len(stack):
            raise SlotStateError("a page is in the free stack twice")
        marked = np.flatnonzero(self._state[1:] == _FREE) + 1
        if not np.array_equal(np.sort(stack), marked):
            raise SlotStateError(f"{len(stack)} pages in the stack, {len(marked)} marked free")

    def _pages_to_grow(self, prefix_len: int, seq_len: int) -> int:
        return -(-seq_len // self.page_size) - -(-prefix_len // self.page_size)

    def _extend_one(self, prefix: int, seq: int, last_loc: int, pages: Int32Array) -> Int32Array:
        tail = min(seq - prefix, -prefix % self.page_size)
        if tail and last_loc % self.page_size != (prefix - 1) % self.page_size:
            raise SlotStateError(f"last slot {last_loc} does not end a prefix of {prefix} tokens")
        head = np.arange(last_loc + 1, last_loc + 1 + tail, dtype=np.int32)
        return np.concatenate([head, self._slots(pages)[: seq - prefix - tail]])

    def _slots(self, pages: Int32Array) -> Int32Array:
        return (pages[:, None] * np.int32(self.page_size) + self._offsets).reshape(-1)

    def _take(self, num_pages: int) -> Int32Array | None:
        if num_pages > self._top:
            return None
        pages = self._stack[self._top - num_pages : self._top][::-1].copy()
        self._top -= num_pages
        self._state[pages] = _OWNED
        return pages

    def _put(self, pages: Int32Array) -> None:
        self._stack[self._top : self._top + len(pages)] = pages
        self._top += len(pages)
        self._state[pages] = _FREE


def _pages_of(slots: Int32Array, page_size: int) -> Int32Array:
    """The pages that the slots lie in, ascending, each once. Slots come in runs of whole pages: the sort is of the few
    places where the page changes."""
    pages = slots // page_size
    changes = np.flatnonzero(pages[1:] != pages[:-1]) + 1
    return np.unique(pages[np.concatenate([[0], changes])]).astype(np.int32)
