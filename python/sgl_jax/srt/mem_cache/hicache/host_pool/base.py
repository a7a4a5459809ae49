"""The host tier: pages in (pinned) host memory, their life cycle and their bytes.

A pool pairs a `PageTable` (who owns which page) with one scheme of keeping bytes: `per_block` holds one reference per
page, `slab` writes into arrays that exist from the start. The schemes differ in memory behaviour only; the same
contract tests run over both.

Threads: everything is for the engine thread, except `put`, `write_bytes`, `get` and `read_bytes`, which a worker may
call for pages that are locked (nobody can free those under it). The pool never imports the transfer layer: what it
needs of it comes in as a `HostArrays`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np
import numpy.typing as npt

from ..errors import InvariantError, PageStateError
from ..storage.base import Payload
from ..types import PageLayout
from .host_page import HostPage, SparePages
from .page_table import HostPages, PageIds, PageState, PageTable

ByteArray = npt.NDArray[np.uint8]

_READY = int(PageState.READY)

Slab = tuple[jax.Array, ...]
"""Many pages in host memory: the arrays of a `HostPage` with a leading axis [num_pages]."""


class HostArrays(Protocol):
    """What a pool needs from the transfer layer to turn host arrays into bytes and slabs."""

    @property
    def spares(self) -> SparePages:
        """Where the arrays of dead pages go for the next ones to be written into; empty unless a pool fills it."""
        ...

    def host_page_bytes(self, page: HostPage) -> list[ByteArray]:
        """The bytes of a page as C-contiguous uint8 arrays in layout order; waits until the page is complete."""
        ...

    def host_page_from_bytes(self, data: ByteArray) -> HostPage:
        """A page in host memory from uint8[page_bytes]; takes `data` over and makes it read-only."""
        ...

    def new_slab(self, num_pages: int) -> Slab:
        """Zeroed arrays for `num_pages` pages in host memory."""
        ...

    def write_slab(self, slab: Slab, host_pages: HostPages, pages: Sequence[HostPage]) -> Slab:
        """Write pages into rows; `slab` is donated and must not be used again."""
        ...

    def read_slab(self, slab: Slab, host_pages: HostPages) -> list[HostPage]:
        """Copies of rows, which stay valid whatever is written to the slab afterwards."""
        ...


class HostKVPool(ABC):
    """Pages of one component in host memory; see the module for the thread rule.

    Invariants: those of `PageTable`, and P4: a READY page has bytes, a FREE page has none.
    """

    def __init__(self, num_pages: int, layout: PageLayout, arrays: HostArrays) -> None:
        self._table = PageTable(num_pages)
        self._layout = layout
        self._arrays = arrays
        self._filled = bytearray(num_pages)

    @property
    def layout(self) -> PageLayout:
        """What a page of this pool is made of."""
        return self._layout

    @property
    def num_pages(self) -> int:
        """All pages of the pool."""
        return self._table.num_pages

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can hand out now."""
        return self._table.num_free

    @property
    def num_evictable(self) -> int:
        """READY pages that no lock holds."""
        return self._table.num_evictable

    @property
    def num_locked(self) -> int:
        """Pages with at least one lock; O(num_pages)."""
        return self._table.num_locked

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all pages together."""
        return self.num_pages * self._layout.page_bytes

    @property
    @abstractmethod
    def host_bytes(self) -> int:
        """Bytes of host memory that the pool holds now; O(num_pages)."""

    def alloc(self, num_pages: int) -> HostPages | None:
        """Take FREE pages for writing: int32[num_pages], or None with nothing changed if too few are free."""
        return self._table.alloc(num_pages)

    def mark_ready(self, host_pages: HostPages) -> None:
        """Publish WRITING pages whose bytes were put; PageStateError (nothing changed) if one has none."""
        ids = self._table.require(host_pages, PageState.WRITING, "marked ready")
        empty = [page for page in ids if not self._filled[page]]
        if empty:
            raise PageStateError(f"host pages {empty[:8]} marked ready without bytes")
        self._table.mark_ready(host_pages)

    def free(self, host_pages: HostPages) -> None:
        """Give pages back with their bytes. PageStateError (nothing changed) on FREE, locked or repeated pages."""
        self._forget(self._table.free(host_pages))

    def evict(self, num_pages: int) -> HostPages:
        """Free up to `num_pages` READY, unlocked pages, the least recently used first; returns int32[k]."""
        pages = self._table.evict(num_pages)
        self._forget(pages.tolist())
        return pages

    def oldest(self, num_pages: int) -> HostPages:
        """The pages that `evict(num_pages)` would free now; changes nothing."""
        return self._table.oldest(num_pages)

    def touch(self, host_pages: HostPages) -> None:
        """Move pages to the young end of the eviction order."""
        self._table.touch(host_pages)

    def lock(self, host_pages: HostPages) -> None:
        """Add a lock to each WRITING or READY page: it can be neither freed nor evicted until unlocked as often."""
        self._table.lock(host_pages)

    def unlock(self, host_pages: HostPages) -> None:
        """Take one lock from each page; PageStateError if one has none."""
        self._table.unlock(host_pages)

    def is_ready(self, host_pages: HostPages) -> npt.NDArray[np.bool_]:
        """Which pages are READY: bool[num_pages]."""
        return np.equal(self._table.states_of(host_pages), _READY)

    def all_ready(self, host_pages: HostPages) -> bool:
        """True if every one of the pages is READY."""
        return self._table.all_in(host_pages, PageState.READY)

    def is_locked(self, host_pages: HostPages) -> npt.NDArray[np.bool_]:
        """Which pages have at least one lock: bool[num_pages]."""
        return self._table.refs_of(host_pages) > 0

    def any_locked(self, host_pages: HostPages) -> bool:
        """True if one of the pages has a lock."""
        return self._table.any_locked(host_pages)

    def epochs(self, host_pages: HostPages) -> npt.NDArray[np.int64]:
        """The tenancy of each page; a page that was given away and allocated again has a greater one."""
        return self._table.epochs(host_pages)

    def put(self, host_pages: HostPages, pages: Sequence[HostPage]) -> None:
        """Give WRITING pages their bytes, one host page each. Any thread. The arrays need not be complete yet."""
        ids = self._writable(host_pages, len(pages))
        self._store(ids, pages)
        for page in ids:
            self._filled[page] = True

    def write_bytes(self, host_pages: HostPages, arrays: Sequence[ByteArray]) -> None:
        """Give WRITING pages their bytes from uint8[page_bytes] arrays, which the pool takes over. Any thread."""
        self.put(host_pages, [self._arrays.host_page_from_bytes(array) for array in arrays])

    def get(self, host_pages: HostPages) -> list[HostPage]:
        """READY pages for a load. The result outlives a later `free`. Any thread, if locked.

        A hit moves the pages to the young end: at once, or, for locked ones, when they are unlocked.
        """
        ids = self._table.require(host_pages, PageState.READY, "read")
        pages = self._fetch(ids)
        self._table.touch(host_pages)
        return pages

    def read_bytes(self, host_pages: HostPages) -> list[Payload]:
        """Bytes of READY pages for storage; valid after the page is freed or refilled. Any thread, if locked."""
        ids = self._table.require(host_pages, PageState.READY, "read")
        return [self._arrays.host_page_bytes(page) for page in self._fetch(ids)]

    def clear(self) -> None:
        """Forget everything: all pages FREE, in a new epoch. PageStateError (nothing changed) if one is locked."""
        self._table.clear()
        self._forget(range(self.num_pages))

    def check_invariants(self) -> None:
        """Raise InvariantError with the numbers if a fact of the class is broken; O(num_pages)."""
        self._table.check_invariants()
        states = self._table.states_of(np.arange(self.num_pages, dtype=np.int32))
        filled = np.array(self._filled, bool)
        wrong = ((states == int(PageState.FREE)) & filled) | ((states == _READY) & ~filled)
        if wrong.any():
            raise InvariantError(
                f"P4: pages {np.flatnonzero(wrong)[:8].tolist()} are FREE with bytes or READY without"
            )

    @abstractmethod
    def _store(self, ids: PageIds, pages: Sequence[HostPage]) -> None:
        """Keep the bytes of `pages` as pages `ids`."""

    @abstractmethod
    def _fetch(self, ids: PageIds) -> list[HostPage]:
        """The bytes of pages `ids`, independent of what happens to the pages afterwards."""

    @abstractmethod
    def _drop(self, ids: Sequence[int]) -> None:
        """Let go of what is held for pages `ids`."""

    def _writable(self, host_pages: HostPages, num_given: int) -> PageIds:
        ids = self._table.require(host_pages, PageState.WRITING, "written")
        if len(ids) != num_given:
            raise ValueError(f"{len(ids)} host pages but bytes for {num_given}")
        return ids

    def _forget(self, ids: Sequence[int]) -> None:
        for page in ids:
            self._filled[page] = False
        self._drop(ids)
