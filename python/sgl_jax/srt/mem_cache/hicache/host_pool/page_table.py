"""The life cycle of host pages: states, locks, epochs, free list and least-recently-used order.

          alloc              mark_ready
    FREE ───────▶ WRITING ───────────────▶ READY
     ▲               │                       │
     └───────────────┴───────── free ────────┘      (READY only: evict)

Owns numbers only; the bytes belong to a `HostKVPool`. A page with refs > 0 can be neither freed nor evicted. Every
method either does all that it was asked or raises and changes nothing. One thread (the engine's) calls the methods
that change state; `states_of` may be read by a worker for pages that a lock or the WRITING state protects.

Invariants (`check_invariants`):
  P1 the free list holds every FREE page once and nothing else;
  P2 the LRU order holds exactly the READY pages without a lock;
  P3 locks are never negative, and FREE pages have none.
"""

from __future__ import annotations

import enum
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from ..errors import InvariantError, PageStateError

HostPages = npt.NDArray[np.int32]
"""Ids of host pages: int32[num_pages]."""


class PageState(enum.IntEnum):
    """Where a host page is in its life; the values are what `PageTable` keeps in its state array."""

    FREE = 0
    WRITING = 1
    READY = 2


# Plain numbers: numpy takes five times as long to compare with a member of an IntEnum.
_FREE, _WRITING, _READY = int(PageState.FREE), int(PageState.WRITING), int(PageState.READY)

_EDGES = {(_FREE, _WRITING), (_WRITING, _READY), (_WRITING, _FREE), (_READY, _FREE)}


class PageTable:
    """Bookkeeping of `num_pages` host pages; see the module for states and invariants."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"num_pages must not be negative, got {num_pages}")
        self._states = np.full(num_pages, _FREE, np.uint8)
        self._refs = np.zeros(num_pages, np.int32)
        self._epochs = np.zeros(num_pages, np.int64)
        # A stack with its top at the end; descending, so that the first pages handed out are 0, 1, 2, ...
        self._free_stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages
        # READY pages without a lock, oldest first. Locked and WRITING pages are not in it, so eviction never skips.
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._marks = np.zeros(num_pages, np.int32)
        self._places = np.arange(num_pages, dtype=np.int32)

    @property
    def num_pages(self) -> int:
        """All pages, whatever their state."""
        return len(self._states)

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can hand out now."""
        return self._num_free

    @property
    def num_evictable(self) -> int:
        """READY pages without a lock."""
        return len(self._lru)

    @property
    def num_locked(self) -> int:
        """Pages with at least one lock; O(num_pages)."""
        return int(np.count_nonzero(self._refs))

    def alloc(self, num_pages: int) -> HostPages | None:
        """Take pages from FREE to WRITING and start a new epoch of each; None (nothing changed) if too few are free."""
        if num_pages < 0:
            raise ValueError(f"cannot allocate {num_pages} pages")
        if num_pages > self._num_free:
            return None
        top = self._num_free
        pages = self._free_stack[top - num_pages : top][::-1].copy()
        self._transition(pages, _FREE, _WRITING)
        self._num_free = top - num_pages
        return pages

    def mark_ready(self, host_pages: HostPages) -> None:
        """WRITING to READY; pages without a lock become evictable, youngest last."""
        pages = self.checked(host_pages)
        self._transition(pages, _WRITING, _READY)
        self._enter_lru(pages[self._refs[pages] == 0])

    def free(self, host_pages: HostPages) -> HostPages:
        """Give pages back and name them. PageStateError if one is FREE already, locked, or named twice."""
        pages = self.checked(host_pages)
        states = self._states[pages]
        self._reject(pages, states == _FREE, "freed twice")
        self._reject(pages, self._refs[pages] != 0, "freed while locked")
        ready = states == _READY
        for page in pages[ready].tolist():
            del self._lru[page]
        self._states[pages] = _FREE
        self._push_free(pages)
        return pages

    def evict(self, num_pages: int) -> HostPages:
        """Free up to `num_pages` pages, the least recently used first, and name them."""
        count = min(max(num_pages, 0), len(self._lru))
        pages = np.fromiter(
            (self._lru.popitem(last=False)[0] for _ in range(count)), np.int32, count
        )
        self._transition(pages, _READY, _FREE)
        self._push_free(pages)
        return pages

    def oldest(self, num_pages: int) -> HostPages:
        """The pages that `evict(num_pages)` would free, without freeing them."""
        count = min(max(num_pages, 0), len(self._lru))
        return np.fromiter(
            (page for page, _ in zip(self._lru, range(count), strict=False)), np.int32
        )

    def touch(self, host_pages: HostPages) -> None:
        """Move pages to the young end; locked and WRITING pages have no place in the order yet and are passed over."""
        pages = self.checked(host_pages, unique=False)
        self._reject(pages, self._states[pages] == _FREE, "touched while FREE")
        for page in pages.tolist():
            if page in self._lru:
                self._lru.move_to_end(page)

    def lock(self, host_pages: HostPages) -> None:
        """Add one lock to each page; PageStateError on FREE pages."""
        pages = self.checked(host_pages)
        self._reject(pages, self._states[pages] == _FREE, "locked while FREE")
        for page in pages.tolist():
            self._lru.pop(page, None)
        self._refs[pages] += 1

    def unlock(self, host_pages: HostPages) -> None:
        """Take one lock from each page; a READY page that loses its last one joins the young end."""
        pages = self.checked(host_pages)
        refs = self._refs[pages]
        self._reject(pages, refs == 0, "unlocked without a lock")
        self._refs[pages] = refs - 1
        last = (refs == 1) & (self._states[pages] == _READY)
        self._enter_lru(pages[last])

    def states_of(self, host_pages: HostPages) -> npt.NDArray[np.uint8]:
        """State of each page: a copy, uint8[num_pages] of `PageState` values."""
        return self._states[self.checked(host_pages, unique=False)]

    def refs_of(self, host_pages: HostPages) -> npt.NDArray[np.int32]:
        """Locks of each page: a copy, int32[num_pages]."""
        return self._refs[self.checked(host_pages, unique=False)]

    def epochs(self, host_pages: HostPages) -> npt.NDArray[np.int64]:
        """How often each page was allocated or reset: a copy. Equal epochs mean the same tenancy."""
        return self._epochs[self.checked(host_pages, unique=False)]

    def require(self, host_pages: HostPages, state: PageState, action: str) -> HostPages:
        """Check that all pages are in `state`; returns them as a private int32 copy."""
        pages = self.checked(host_pages, unique=False)
        wrong = self._states[pages] != int(state)
        if np.count_nonzero(wrong):
            self._reject(pages, wrong, f"{action} while not {state.name}")
        return pages

    def clear(self) -> None:
        """Make every page FREE in a new epoch; PageStateError (nothing changed) if a page is locked."""
        locked = np.flatnonzero(self._refs).astype(np.int32)
        self._reject(locked, np.ones(len(locked), bool), "cleared while locked")
        self._states[:] = _FREE
        self._epochs += 1
        self._lru.clear()
        self._free_stack = np.arange(self.num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = self.num_pages

    def check_invariants(self) -> None:
        """Raise InvariantError with the numbers if P1, P2 or P3 of the module is broken; O(num_pages)."""
        free = np.sort(self._free_stack[: self._num_free])
        expected_free = np.flatnonzero(self._states == _FREE)
        if not np.array_equal(free, expected_free):
            raise InvariantError(
                f"P1: free list holds {len(free)} entries ({len(np.unique(free))} distinct), "
                f"{len(expected_free)} of {self.num_pages} pages are FREE"
            )
        evictable = np.flatnonzero((self._states == _READY) & (self._refs == 0))
        listed = np.sort(np.fromiter(self._lru, np.int64, len(self._lru)))
        if not np.array_equal(listed, evictable):
            stray = np.setxor1d(listed, evictable)[:8].tolist()
            raise InvariantError(
                f"P2: LRU order holds {len(listed)} pages, {len(evictable)} are READY without a "
                f"lock; differing pages {stray}"
            )
        wrong = np.flatnonzero((self._refs < 0) | ((self._refs > 0) & (self._states == _FREE)))
        if len(wrong):
            raise InvariantError(
                f"P3: pages {wrong[:8].tolist()} have locks {self._refs[wrong[:8]].tolist()} in "
                f"states {self._states[wrong[:8]].tolist()}"
            )

    def checked(self, host_pages: HostPages, unique: bool = True) -> HostPages:
        """A private int32[n] copy of page ids, after range and (unless told not to) duplicate checks."""
        pages = np.array(host_pages, dtype=np.int32, ndmin=1)
        if pages.ndim != 1:
            raise ValueError(f"host pages must be one-dimensional, got shape {pages.shape}")
        if not len(pages):
            return pages
        # Seen as unsigned, a negative id is above every bound: one comparison for both ends.
        if np.count_nonzero(pages.view(np.uint32) >= self.num_pages):
            outside = pages[(pages < 0) | (pages >= self.num_pages)]
            raise PageStateError(f"host pages {outside[:8].tolist()} outside [0, {self.num_pages})")
        if unique:
            # The last writer of a mark wins, so an id that comes twice does not find its own mark: O(n), no sort.
            places = self._places[: len(pages)]
            if len(pages) > len(places):
                places = np.arange(len(pages), dtype=np.int32)
            self._marks[pages] = places
            self._reject(pages, self._marks[pages] != places, "named twice in one call")
        return pages

    def _transition(self, pages: HostPages, source: int, target: int) -> None:
        """The only place where a state changes, `free` and `clear` apart, which lead from any state to FREE."""
        if (source, target) not in _EDGES:
            raise PageStateError(f"no way from {_name(source)} to {_name(target)}")
        wrong = self._states[pages] != source
        if np.count_nonzero(wrong):
            self._reject(pages, wrong, f"set {_name(target)} while not {_name(source)}")
        self._states[pages] = target
        if source == _FREE:
            self._epochs[pages] += 1

    def _push_free(self, pages: HostPages) -> None:
        self._free_stack[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def _enter_lru(self, pages: HostPages) -> None:
        for page in pages.tolist():
            self._lru[page] = None

    def _reject(self, pages: HostPages, wrong: npt.NDArray[np.bool_], action: str) -> None:
        if not np.count_nonzero(wrong):  # much faster than any() for a few pages
            return
        bad = pages[wrong][:8]
        states = [_name(state) for state in self._states[bad].tolist()]
        raise PageStateError(
            f"{int(wrong.sum())} host pages {action}: ids {bad.tolist()}, states {states}, "
            f"locks {self._refs[bad].tolist()}"
        )


def _name(state: int) -> str:
    return PageState(state).name
