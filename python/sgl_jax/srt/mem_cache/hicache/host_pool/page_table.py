"""The life cycle of host pages: states, locks, epochs, free list and least-recently-used order.

          alloc              mark_ready
    FREE ───────▶ WRITING ───────────────▶ READY
     ▲               │                       │
     └───────────────┴───────── free ────────┘      (READY only: evict)

Owns numbers only; the bytes belong to a `HostKVPool`. A page with refs > 0 can be neither freed nor evicted. Every
method either does all that it was asked or raises and changes nothing. One thread (the engine's) calls the methods
that change state; `require` may be called by a worker for pages that a lock or the WRITING state protects.

Kept in plain Python, not in arrays: a call names a few pages, for which that is faster, and at many of numpy's small
steps the engine's thread would hand the interpreter to a worker and wait for it.

Invariants (`check_invariants`):
  P1 the free list holds every FREE page once and nothing else;
  P2 the LRU order holds exactly the READY pages without a lock;
  P3 locks are never negative, and FREE pages have none.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from itertools import islice

import numpy as np
import numpy.typing as npt

from ..errors import InvariantError, PageStateError

HostPages = npt.NDArray[np.int32]
"""Ids of host pages: int32[num_pages]."""

PageIds = list[int]
"""The same, checked, inside a pool."""


class PageState(enum.IntEnum):
    """Where a host page is in its life; the values are what `PageTable` keeps."""

    FREE = 0
    WRITING = 1
    READY = 2


# Plain numbers: an IntEnum's member takes several times as long to compare.
_FREE, _WRITING, _READY = int(PageState.FREE), int(PageState.WRITING), int(PageState.READY)

_EDGES = {(_FREE, _WRITING), (_WRITING, _READY), (_WRITING, _FREE), (_READY, _FREE)}


class PageTable:
    """Bookkeeping of `num_pages` host pages; see the module for states and invariants."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"num_pages must not be negative, got {num_pages}")
        self._states = bytearray([_FREE]) * num_pages
        self._refs = [0] * num_pages
        self._epochs = [0] * num_pages
        # A stack with its top at the end; descending, so that the first pages handed out are 0, 1, 2, ...
        self._free_stack = list(range(num_pages - 1, -1, -1))
        # READY pages without a lock, oldest first. Locked and WRITING pages are not in it, so eviction never skips.
        self._lru: OrderedDict[int, None] = OrderedDict()

    @property
    def num_pages(self) -> int:
        """All pages, whatever their state."""
        return len(self._states)

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can hand out now."""
        return len(self._free_stack)

    @property
    def num_evictable(self) -> int:
        """READY pages without a lock."""
        return len(self._lru)

    @property
    def num_locked(self) -> int:
        """Pages with at least one lock; O(num_pages)."""
        return self.num_pages - self._refs.count(0)

    def alloc(self, num_pages: int) -> HostPages | None:
        """Take pages from FREE to WRITING and start a new epoch of each; None (nothing changed) if too few are free."""
        if num_pages < 0:
            raise ValueError(f"cannot allocate {num_pages} pages")
        rest = len(self._free_stack) - num_pages
        if rest < 0:
            return None
        ids = self._free_stack[rest:]
        ids.reverse()
        self._transition(ids, _FREE, _WRITING)
        del self._free_stack[rest:]
        return np.array(ids, np.int32)

    def mark_ready(self, host_pages: HostPages) -> None:
        """WRITING to READY; pages without a lock become evictable, youngest last."""
        ids, refs = self._ids(host_pages), self._refs
        self._transition(ids, _WRITING, _READY)
        self._lru.update((page, None) for page in ids if not refs[page])

    def free(self, host_pages: HostPages) -> PageIds:
        """Give pages back and name them. PageStateError if one is FREE already, locked, or named twice."""
        ids, states, refs, lru = self._ids(host_pages), self._states, self._refs, self._lru
        self._reject([page for page in ids if states[page] == _FREE], "freed twice")
        self._reject([page for page in ids if refs[page]], "freed while locked")
        for page in ids:
            if states[page] == _READY:
                del lru[page]
            states[page] = _FREE
        self._free_stack += ids
        return ids

    def evict(self, num_pages: int) -> HostPages:
        """Free up to `num_pages` pages, the least recently used first, and name them."""
        count = min(max(num_pages, 0), len(self._lru))
        ids = [self._lru.popitem(last=False)[0] for _ in range(count)]
        self._transition(ids, _READY, _FREE)
        self._free_stack += ids
        return np.array(ids, np.int32)

    def oldest(self, num_pages: int) -> HostPages:
        """The pages that `evict(num_pages)` would free, without freeing them."""
        return np.array(list(islice(self._lru, max(num_pages, 0))), np.int32)

    def touch(self, host_pages: HostPages) -> None:
        """Move pages to the young end; locked and WRITING pages have no place in the order yet and are passed over."""
        ids, states, lru = self._ids(host_pages, unique=False), self._states, self._lru
        self._reject([page for page in ids if states[page] == _FREE], "touched while FREE")
        for page in ids:
            if page in lru:
                lru.move_to_end(page)

    def lock(self, host_pages: HostPages) -> None:
        """Add one lock to each page; PageStateError on FREE pages."""
        ids, states, refs, lru = self._ids(host_pages), self._states, self._refs, self._lru
        self._reject([page for page in ids if states[page] == _FREE], "locked while FREE")
        for page in ids:
            lru.pop(page, None)
            refs[page] += 1

    def unlock(self, host_pages: HostPages) -> None:
        """Take one lock from each page; a READY page that loses its last one joins the young end."""
        ids, states, refs, lru = self._ids(host_pages), self._states, self._refs, self._lru
        self._reject([page for page in ids if not refs[page]], "unlocked without a lock")
        for page in ids:
            refs[page] -= 1
            if not refs[page] and states[page] == _READY:
                lru[page] = None

    def states_of(self, host_pages: HostPages) -> npt.NDArray[np.uint8]:
        """State of each page: uint8[num_pages] of `PageState` values."""
        ids = self._ids(host_pages, unique=False)
        return np.array([self._states[page] for page in ids], np.uint8)

    def refs_of(self, host_pages: HostPages) -> npt.NDArray[np.int32]:
        """Locks of each page: int32[num_pages]."""
        ids = self._ids(host_pages, unique=False)
        return np.array([self._refs[page] for page in ids], np.int32)

    def epochs(self, host_pages: HostPages) -> npt.NDArray[np.int64]:
        """How often each page was allocated or reset: int64[num_pages]. Equal epochs mean the same tenancy."""
        ids = self._ids(host_pages, unique=False)
        return np.array([self._epochs[page] for page in ids], np.int64)

    def all_in(self, host_pages: HostPages, state: PageState) -> bool:
        """True if every one of the pages is in `state`."""
        ids = self._ids(host_pages, unique=False)
        return {int(state)}.issuperset(map(self._states.__getitem__, ids))

    def any_locked(self, host_pages: HostPages) -> bool:
        """True if one of the pages has a lock."""
        return any(map(self._refs.__getitem__, self._ids(host_pages, unique=False)))

    def require(self, host_pages: HostPages, state: PageState, action: str) -> PageIds:
        """Check that all pages are in `state`; returns them."""
        ids, states, wanted = self._ids(host_pages, unique=False), self._states, int(state)
        self._reject(
            [page for page in ids if states[page] != wanted], f"{action} while not {state.name}"
        )
        return ids

    def clear(self) -> None:
        """Make every page FREE in a new epoch; PageStateError (nothing changed) if a page is locked."""
        locked = [page for page, refs in enumerate(self._refs) if refs]
        self._reject(locked, "cleared while locked")
        self._states = bytearray([_FREE]) * self.num_pages
        self._epochs = [epoch + 1 for epoch in self._epochs]
        self._lru.clear()
        self._free_stack = list(range(self.num_pages - 1, -1, -1))

    def check_invariants(self) -> None:
        """Raise InvariantError with the numbers if P1, P2 or P3 of the module is broken; O(num_pages)."""
        states, refs = self._states, self._refs
        free = [page for page, state in enumerate(states) if state == _FREE]
        if sorted(self._free_stack) != free:
            raise InvariantError(
                f"P1: free list holds {len(self._free_stack)} entries ({len(set(self._free_stack))} "
                f"distinct), {len(free)} of {self.num_pages} pages are FREE"
            )
        evictable = {
            page for page, state in enumerate(states) if state == _READY and not refs[page]
        }
        if self._lru.keys() != evictable:
            raise InvariantError(
                f"P2: LRU order holds {len(self._lru)} pages, {len(evictable)} are READY without a "
                f"lock; differing pages {sorted(self._lru.keys() ^ evictable)[:8]}"
            )
        wrong = [
            page for page, held in enumerate(refs) if held < 0 or (held and states[page] == _FREE)
        ][:8]
        if wrong:
            raise InvariantError(
                f"P3: pages {wrong} have locks {[refs[page] for page in wrong]} in states "
                f"{[states[page] for page in wrong]}"
            )

    def _ids(self, host_pages: HostPages, unique: bool = True) -> PageIds:
        """Page ids after range and (unless told not to) duplicate checks."""
        pages = np.asarray(host_pages, np.int32)
        if pages.ndim != 1:
            raise ValueError(f"host pages must be one-dimensional, got shape {pages.shape}")
        ids: PageIds = pages.tolist()
        if ids and (min(ids) < 0 or max(ids) >= len(self._states)):
            outside = [page for page in ids if not 0 <= page < self.num_pages]
            raise PageStateError(f"host pages {outside[:8]} outside [0, {self.num_pages})")
        if unique and len(set(ids)) != len(ids):
            count = Counter(ids)
            self._reject([page for page in ids if count[page] > 1], "named twice in one call")
        return ids

    def _transition(self, ids: PageIds, source: int, target: int) -> None:
        """The only place where a state changes, `free` and `clear` apart, which lead from any state to FREE."""
        if (source, target) not in _EDGES:
            raise PageStateError(f"no way from {_name(source)} to {_name(target)}")
        states, epochs = self._states, self._epochs
        self._reject(
            [page for page in ids if states[page] != source],
            f"set {_name(target)} while not {_name(source)}",
        )
        for page in ids:
            states[page] = target
        if source == _FREE:
            for page in ids:
                epochs[page] += 1

    def _reject(self, bad: PageIds, action: str) -> None:
        if bad:
            states = [_name(self._states[page]) for page in bad[:8]]
            raise PageStateError(
                f"{len(bad)} host pages {action}: ids {bad[:8]}, states {states}, "
                f"locks {[self._refs[page] for page in bad[:8]]}"
            )


def _name(state: int) -> str:
    return PageState(state).name
