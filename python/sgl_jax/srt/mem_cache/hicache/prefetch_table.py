"""Storage prefetches of waiting requests: one per request, from arrival to admission.

    LOOKUP -> FETCH (in chunks, used in order as they arrive) -> ENDED

A prefetch only ever holds transfers in flight; pages that arrived belong to the tree at once, whether or not the
request still wants them. So an aborted request has nothing to give back but its entry here. Transfers are known by
their id: when a request id is used again, results of the earlier attempt find the earlier record.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .tree_node import KeyNamespace
from .types import PageKey, TransferId, TransferResult


class PrefetchState(enum.Enum):
    """How far a prefetch is."""

    LOOKUP = "lookup"
    FETCH = "fetch"
    ENDED = "ended"


@dataclass(eq=False)
class Prefetch:
    """One request's question to storage.

    `key` is the prompt's whole pages; pages before `first_page` were in the tree when it was asked. `loaded` is the
    half-open token range of the prompt that this prefetch brought into the tree.
    """

    rid: str
    namespace: KeyNamespace
    key: bytes
    first_page: int
    state: PrefetchState = PrefetchState.LOOKUP
    page_keys: tuple[PageKey, ...] = ()
    chunks: deque[TransferId] = field(default_factory=deque)
    arrived: dict[TransferId, TransferResult] = field(default_factory=dict)
    next_page: int = 0
    broken: bool = False
    loaded: tuple[int, int] = (0, 0)
    asked_at_s: float | None = None
    timed_out: bool = False
    waited_s: float = 0.0


class PrefetchTable:
    """The prefetches of all waiting requests.

    `deadline_s`: how long a request that could be admitted waits for its pages, counted from the first time it is
    asked for. `clock` is monotonic seconds.
    """

    def __init__(self, deadline_s: float, clock: Callable[[], float]) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._by_rid: dict[str, Prefetch] = {}
        self._by_transfer: dict[TransferId, Prefetch] = {}

    def start(self, prefetch: Prefetch, lookup: TransferId) -> None:
        """Register a prefetch whose look-up was submitted as `lookup`."""
        prefetch.next_page = prefetch.first_page
        self._by_rid[prefetch.rid] = prefetch
        self._by_transfer[lookup] = prefetch

    def wanted(self, prefetch: Prefetch) -> bool:
        """True while its request still waits for it."""
        return self._by_rid.get(prefetch.rid) is prefetch and not prefetch.timed_out

    def ready(self, rid: str) -> bool:
        """True if the request need not wait any longer: no prefetch, ended, or past the deadline."""
        prefetch = self._by_rid.get(rid)
        if prefetch is None or prefetch.state is PrefetchState.ENDED or prefetch.timed_out:
            return True
        now_s = self._clock()
        if prefetch.asked_at_s is None:
            prefetch.asked_at_s = now_s
        prefetch.waited_s = now_s - prefetch.asked_at_s
        prefetch.timed_out = prefetch.waited_s >= self._deadline_s
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

    def fetching(self, prefetch: Prefetch, fetch: TransferId) -> None:
        """A chunk of its pages was submitted as `fetch`; chunks are used in the order of these calls."""
        prefetch.state = PrefetchState.FETCH
        prefetch.chunks.append(fetch)
        self._by_transfer[fetch] = prefetch

    def arrived(self, result: TransferResult) -> tuple[Prefetch | None, list[TransferResult]]:
        """Note an ended chunk; return its prefetch and the chunks that can be used now, in order."""
        prefetch = self._by_transfer.pop(result.transfer_id, None)
        if prefetch is None:
            return None, [result]
        prefetch.arrived[result.transfer_id] = result
        usable = []
        while prefetch.chunks and prefetch.chunks[0] in prefetch.arrived:
            usable.append(prefetch.arrived.pop(prefetch.chunks.popleft()))
        return prefetch, usable

    def end_if_idle(self, prefetch: Prefetch) -> None:
        """No chunk is left: the prefetch has ended."""
        if not prefetch.chunks:
            prefetch.state = PrefetchState.ENDED

    def clear(self) -> None:
        """Forget everything (the tree was reset); results still to come belong to no one."""
        self._by_rid.clear()
        self._by_transfer.clear()
