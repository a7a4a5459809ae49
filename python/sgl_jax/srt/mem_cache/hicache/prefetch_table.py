"""Storage prefetches of waiting requests: one per request, from arrival to admission.

    LOOKUP -> FETCH (in chunks, used in order as they arrive; again if some could not be read) -> ENDED

A prefetch only ever holds transfers in flight; pages that arrived belong to the tree at once, whether or not the
request still wants them. So an aborted request has nothing to give back but its entry here. Transfers are known by
their id: when a request id is used again, results of the earlier attempt find the earlier record.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .config import PrefetchPolicy, PrefetchRules
from .tree_node import KeyNamespace
from .types import ComponentKind, PageKey, TransferId, TransferResult


class PrefetchState(enum.Enum):
    """How far a prefetch is."""

    LOOKUP = "lookup"
    FETCH = "fetch"
    ENDED = "ended"


@dataclass(frozen=True)
class FetchChunk:
    """Pages of one component that one read brings; `pages` are their numbers in the prompt, ascending."""

    component: ComponentKind
    pages: tuple[int, ...]


@dataclass(eq=False)
class Prefetch:
    """One request's question to storage.

    `key` is the prompt's whole pages. `found` says, per component, which of them storage has (page number -> key), less
    what turned out not to be readable; `num_rounds` how often reads were planned from it. `loaded` is the half-open
    token range of the prompt whose Full pages this prefetch brought into the tree.
    """

    rid: str
    namespace: KeyNamespace
    key: bytes
    state: PrefetchState = PrefetchState.LOOKUP
    found: dict[ComponentKind, dict[int, PageKey]] = field(default_factory=dict)
    num_rounds: int = 0
    chunks: deque[tuple[TransferId, FetchChunk]] = field(default_factory=deque)
    arrived: dict[TransferId, TransferResult] = field(default_factory=dict)
    loaded: tuple[int, int] | None = None
    asked_at_s: float | None = None
    timed_out: bool = False
    waited_s: float = 0.0
    admitted: bool = False


class PrefetchTable:
    """The prefetches of all waiting requests.

    `rules` say how long a request that could be admitted waits for its pages; the time is counted from the first call
    of `ready` for it. `clock` is monotonic seconds.
    """

    def __init__(self, rules: PrefetchRules, clock: Callable[[], float]) -> None:
        self._rules = rules
        self._clock = clock
        self._last_read_s = clock()
        self._by_rid: dict[str, Prefetch] = {}
        self._by_transfer: dict[TransferId, Prefetch] = {}

    def start(self, prefetch: Prefetch, lookup: TransferId) -> None:
        """Register a prefetch whose look-up was submitted as `lookup`."""
        self._by_rid[prefetch.rid] = prefetch
        self._by_transfer[lookup] = prefetch

    def wanted(self, prefetch: Prefetch) -> bool:
        """True while its request still waits for it."""
        waits = not (prefetch.timed_out or prefetch.admitted)
        return waits and self._by_rid.get(prefetch.rid) is prefetch

    def ready(self, rid: str) -> bool:
        """True if the request need not wait any longer: no prefetch, ended, or as long as the rules say."""
        prefetch = self._by_rid.get(rid)
        if prefetch is None or prefetch.state is PrefetchState.ENDED or prefetch.timed_out:
            return True
        if self._rules.policy is PrefetchPolicy.BEST_EFFORT:
            return True
        now_s = self._clock()
        if prefetch.asked_at_s is None:
            prefetch.asked_at_s = now_s
        prefetch.waited_s = now_s - prefetch.asked_at_s
        without_s = prefetch.waited_s
        if self._rules.policy is PrefetchPolicy.WAIT_COMPLETE:
            # A slow disk is waited for, one that hangs is not. What it reads for others shows that it does not.
            without_s = min(without_s, now_s - self._last_read_s)
        prefetch.timed_out = without_s >= self._rules.deadline_s
        return prefetch.timed_out

    def release(self, rid: str) -> None:
        """Forget the request's prefetch, if it has one."""
        self._by_rid.pop(rid, None)

    def get(self, rid: str) -> Prefetch | None:
        """The request's prefetch, if it has one."""
        return self._by_rid.get(rid)

    def of_lookup(self, lookup: TransferId) -> Prefetch | None:
        """The prefetch that an ended look-up belongs to, once."""
        return self._by_transfer.pop(lookup, None)

    def fetching(self, prefetch: Prefetch, fetch: TransferId, chunk: FetchChunk) -> None:
        """A chunk of its pages was submitted as `fetch`; chunks are used in the order of these calls."""
        prefetch.state = PrefetchState.FETCH
        prefetch.chunks.append((fetch, chunk))
        self._by_transfer[fetch] = prefetch

    def of_fetch(self, result: TransferResult) -> Prefetch | None:
        """The prefetch that an ended read belongs to, once; `usable` hands the read out in its turn."""
        self._last_read_s = self._clock()
        prefetch = self._by_transfer.pop(result.transfer_id, None)
        if prefetch is not None:
            prefetch.arrived[result.transfer_id] = result
        return prefetch

    def usable(self, prefetch: Prefetch) -> list[tuple[FetchChunk, TransferResult]]:
        """The chunks that can be used now, in order, each once."""
        usable = []
        while prefetch.chunks and prefetch.chunks[0][0] in prefetch.arrived:
            fetch, chunk = prefetch.chunks.popleft()
            usable.append((chunk, prefetch.arrived.pop(fetch)))
        return usable

    @property
    def num_waiting(self) -> int:
        """Requests whose pages are still looked for or read."""
        return sum(
            p.state is not PrefetchState.ENDED and self.wanted(p) for p in self._by_rid.values()
        )

    def end_all(self) -> list[TransferResult]:
        """No prefetch goes on. Results still to come belong to no one, and so do those whose turn had not come, which
        are returned."""
        waiting = dict.fromkeys(self._by_transfer.values())  # for the reads whose turn it was
        unused = [result for prefetch in waiting for result in prefetch.arrived.values()]
        for prefetch in [*waiting, *self._by_rid.values()]:
            prefetch.state = PrefetchState.ENDED
            prefetch.chunks.clear()
            prefetch.arrived.clear()
        self._by_transfer.clear()
        return unused

    def clear(self) -> list[TransferResult]:
        """`end_all`, and forget every request (the tree was reset)."""
        unused = self.end_all()
        self._by_rid.clear()
        return unused
