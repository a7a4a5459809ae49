"""Moves pages between the tiers and knows what is in flight. The tree decides what moves; this module moves it.

Bytes go device -> host -> storage on backup and storage -> host -> device on load. One scheduler step:

    poll -> settle -> match -> plan load -> submit load -> forward -> insert -> submit backup

Only `poll` (settle) changes a page's state because a transfer ended. Every method is called on the scheduler thread,
which owns the device buffers; workers touch only gathered copies, host pages and files. Host pages of a transfer are
locked in their pool from before it is submitted until it is settled, so they can be neither freed nor evicted; what
the tree gives up meanwhile (`evict_callback`) is freed by the settle. Transfer ids are never reused: a late completion
can not be taken for another attempt's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .async_impl import Completion, DeviceJob, IoJob, IoLane, TransferExecutor
from .chunks import bucket_sizes
from .errors import InvariantError, StorageUnavailableError
from .host_pool.base import HostKVPool
from .metrics import HiCacheMetrics
from .page_key import PageHasher
from .storage.base import HiCacheStorage, PageBytes
from .transfer import PageTransfer, StagedPages
from .types import (
    ComponentKind,
    LookupResult,
    PageKey,
    PageLink,
    TransferId,
    TransferKind,
    TransferResult,
)

Int32Array = npt.NDArray[np.int32]
Settled = TransferResult | LookupResult

_PagePairs = tuple[Int32Array, Int32Array]
"""Host pages and the device pages that they get."""

STORAGE_BATCH_PAGES = 32
"""Pages per storage call: enough to hide the call, few enough that a batch's bytes stay small."""


@dataclass(frozen=True)
class ComponentIO:
    """The byte movers of one component: its device buffers, its host pool and, with L3 on, its storage."""

    transfer: PageTransfer
    host_pool: HostKVPool
    storage: HiCacheStorage | None = None


@dataclass(frozen=True)
class CompanionQuery:
    """Pages of a component beside Full that storage may have, and how their keys follow from the Full keys."""

    pages: Sequence[int]
    derive_key: Callable[[PageKey], PageKey]


@dataclass(frozen=True)
class StorageQuery:
    """What to look up of a prompt: the Full pages whose `tokens` follow `parent`, from page `first_page` on, and the
    companions of pages that have a Full key. `known_keys`: Full keys of the pages before `first_page`, needed only for
    companions."""

    hasher: PageHasher
    first_page: int
    parent: PageKey | None
    tokens: bytes
    known_keys: Sequence[PageKey] = ()
    companions: Mapping[ComponentKind, CompanionQuery] = field(default_factory=dict)

    @property
    def num_asked(self) -> int:
        """Full pages asked for."""
        return len(self.tokens) // self.hasher.page_token_bytes


class TransferFuture:
    """A transfer under way. `result` is None until a poll settles it; scheduler thread only."""

    def __init__(self, transfer_id: TransferId) -> None:
        self.transfer_id = transfer_id
        self.result: TransferResult | None = None

    def done(self) -> bool:
        """True once the transfer is settled."""
        return self.result is not None


class LoadFuture(TransferFuture):
    """A load: after success `staged` holds the pages on the device, ready for `commit_load`."""

    def __init__(self, transfer_id: TransferId, device_pages: Int32Array, dp_rank: int) -> None:
        super().__init__(transfer_id)
        self.device_pages = device_pages
        self.dp_rank = dp_rank
        self.staged: StagedPages | None = None


@dataclass(frozen=True)
class _Pending:
    """A submitted transfer; its host pages are locked."""

    kind: TransferKind
    component: ComponentKind
    host_pages: Int32Array
    num_bytes: int
    future: TransferFuture | None


class StorageBackoff:
    """Stops writing to a storage that fails, and tries again later: after 1 s, then twice as long, at most 30 s."""

    FIRST_S = 1.0
    LONGEST_S = 30.0

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause_s = 0.0
        self._paused_until = float("-inf")

    @property
    def open(self) -> bool:
        """True if a write may be tried now."""
        return self._clock() >= self._paused_until

    def record(self, ok: bool) -> None:
        """Note how a write ended."""
        self._pause_s = 0.0 if ok else min(max(self.FIRST_S, self._pause_s * 2), self.LONGEST_S)
        self._paused_until = self._clock() + self._pause_s if not ok else float("-inf")


class HiCacheController:
    """Schedules all transfers of all components.

    `max_backup_bytes` bounds the gathered copies that wait on the device for their way to the host; `clock` is
    monotonic seconds.
    """

    def __init__(
        self,
        io: Mapping[ComponentKind, ComponentIO],
        executor: TransferExecutor,
        *,
        max_backup_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._io = dict(io)
        self._executor = executor
        self._max_backup_bytes = max_backup_bytes
        self._pending: dict[TransferId, _Pending] = {}
        self._lookups: dict[TransferId, int] = {}  # -> Full pages asked for
        self._given_up: dict[ComponentKind, set[int]] = {kind: set() for kind in io}
        self._settled: list[Settled] = []
        self._backup_bytes = 0
        self._collected: dict[tuple[ComponentKind, int], list[_PagePairs]] = {}
        self._next_id = 0
        self._backoff = {kind: StorageBackoff(clock) for kind in io}
        self._clock = clock

    # -- what there is -----------------------------------------------------------------------------------------------

    def host_pool(self, kind: ComponentKind) -> HostKVPool:
        """The host pool of a component."""
        return self._io[kind].host_pool

    def has_storage(self, kind: ComponentKind) -> bool:
        """True if the component has an L3."""
        return self._io[kind].storage is not None

    def storage_writable(self, kind: ComponentKind) -> bool:
        """True if the component has an L3 that is not in its pause after a failed write."""
        return self.has_storage(kind) and self._backoff[kind].open

    @property
    def num_in_flight(self) -> int:
        """Transfers and look-ups submitted and not yet handed out by `poll`, and backups collected."""
        collected = sum(map(len, self._collected.values()))
        return len(self._pending) + len(self._lookups) + len(self._settled) + collected

    @property
    def num_moving_down(self) -> int:
        """Backups and stores under way."""
        down = (TransferKind.BACKUP, TransferKind.STORE)
        return sum(pending.kind in down for pending in self._pending.values())

    def now_s(self) -> float:
        """Seconds of the controller's monotonic clock."""
        return self._clock()

    def backup_fits(self, kind: ComponentKind, num_pages: int) -> bool:
        """True if the gathered copy of that many pages stays within the bound on waiting backups, or nothing waits."""
        waiting = self._backup_bytes
        return not waiting or waiting + self._num_bytes(kind, num_pages) <= self._max_backup_bytes

    def precompile(self) -> None:
        """Compile everything a transfer needs, in every size. At start only, with empty pools, which hold nothing
        afterwards; writes nothing but each rank's sentinel page."""
        for io in self._io.values():
            io.transfer.precompile(io.transfer.chunk_pages)
            for num_pages in bucket_sizes(io.transfer.chunk_pages):
                host_pages = io.host_pool.alloc(num_pages)
                if host_pages is None:
                    break
                staged = io.transfer.gather(np.zeros(num_pages, np.int32))
                io.host_pool.put(host_pages, io.transfer.to_host(staged))
                io.host_pool.mark_ready(host_pages)
                io.transfer.to_device(io.host_pool.get(host_pages))
                io.host_pool.free(host_pages)
            io.host_pool.clear()  # what it keeps for the next pages, too

    def report(self, metrics: HiCacheMetrics) -> None:
        """Bring gauges and storage counters up to date."""
        in_flight = Counter(pending.kind for pending in self._pending.values())
        for transfer_kind in TransferKind:
            metrics.in_flight(transfer_kind, in_flight[transfer_kind])
        for kind, io in self._io.items():
            pool = io.host_pool
            metrics.host_pages(kind, pool.num_pages - pool.num_free, pool.num_pages)
            if io.storage is not None:
                metrics.storage(kind, io.storage.stats())

    # -- transfers ---------------------------------------------------------------------------------------------------

    def write(
        self,
        kind: ComponentKind,
        host_pages: Int32Array,
        device_pages: Int32Array,
        dp_rank: int = 0,
    ) -> TransferFuture:
        """Back up: device page i goes to host page i (WRITING, from `host_pool(kind).alloc`).

        The gather is enqueued before this returns, in data order after the last step, so the device pages may be freed
        at once. Never blocks and never raises for a failed transfer: the future's result tells.
        """
        self._hold_for_backup(kind, host_pages)
        return self._start_write(kind, host_pages, device_pages, dp_rank)

    def collect_write(
        self,
        kind: ComponentKind,
        host_pages: Int32Array,
        device_pages: Int32Array,
        dp_rank: int = 0,
    ) -> None:
        """`write`, but begun by `start_writes`, as one transfer with whatever else was collected of this component and
        rank. The device pages may be freed at once, but must not be written before that."""
        self._hold_for_backup(kind, host_pages)
        self._collected.setdefault((kind, dp_rank), []).append((host_pages, device_pages))

    @property
    def has_collected(self) -> bool:
        """True if `start_writes` has something to begin."""
        return bool(self._collected)

    def start_writes(self) -> None:
        """Begin what was collected."""
        collected, self._collected = self._collected, {}
        for (kind, dp_rank), pairs in collected.items():
            host_pages, device_pages = map(np.concatenate, zip(*pairs, strict=True))
            self._start_write(kind, host_pages, device_pages, dp_rank)

    def _hold_for_backup(self, kind: ComponentKind, host_pages: Int32Array) -> None:
        self._io[kind].host_pool.lock(host_pages)
        self._backup_bytes += self._num_bytes(kind, len(host_pages))

    def _start_write(
        self,
        kind: ComponentKind,
        host_pages: Int32Array,
        device_pages: Int32Array,
        dp_rank: int,
    ) -> TransferFuture:
        """Gather and submit; the host pages are locked already."""
        io = self._io[kind]
        future = TransferFuture(self._new_id())
        self._remember(TransferKind.BACKUP, kind, host_pages, future)
        try:
            staged = io.transfer.gather(device_pages, dp_rank)
        except Exception as error:
            self._settle(Completion(future.transfer_id, None, describe(error), 0.0))
            return future
        pages: list[Any] = []

        def start() -> list[Any]:
            pages.extend(io.transfer.to_host(staged))
            return [array for page in pages for array in page]

        def finish() -> list[bool]:
            io.host_pool.put(host_pages, pages)
            return [True] * len(host_pages)

        self._executor.submit_device(DeviceJob(future.transfer_id, start, finish))
        return future

    def load(
        self,
        kind: ComponentKind,
        device_pages: Int32Array,
        host_pages: Int32Array,
        dp_rank: int = 0,
    ) -> LoadFuture:
        """Bring host page i (READY) towards device page i. After success `commit_load` puts it into place."""
        io = self._io[kind]
        future = LoadFuture(self._new_id(), device_pages, dp_rank)
        self._register(TransferKind.LOAD, kind, host_pages, future)
        pages = io.host_pool.get(host_pages)

        def start() -> list[Any]:
            future.staged = io.transfer.to_device(pages, dp_rank)
            return list(future.staged.arrays)

        self._executor.submit_device(
            DeviceJob(future.transfer_id, start, lambda: [True] * len(host_pages))
        )
        return future

    def commit_load(self, kind: ComponentKind, future: LoadFuture) -> None:
        """Scatter loaded pages into the device buffers, in data order before the next step. Donates the buffers."""
        if future.result is None or not future.result.ok or future.staged is None:
            raise InvariantError(f"load {future.transfer_id} is not complete: {future.result}")
        self._io[kind].transfer.scatter(future.staged, future.device_pages, future.dp_rank)
        future.staged = None

    def store(
        self,
        kind: ComponentKind,
        host_pages: Int32Array,
        page_keys: Sequence[PageKey],
        links: Sequence[PageLink | None] | None = None,
    ) -> TransferFuture:
        """Write READY host pages to storage. `links`: what each page follows, where that is known."""
        host_pool, storage = self._io[kind].host_pool, self._storage(kind)
        follows = links if links is not None else [None] * len(page_keys)
        future = TransferFuture(self._new_id())
        self._register(TransferKind.STORE, kind, host_pages, future)

        def run() -> list[bool]:
            stored: list[bool] = []
            for first in range(0, len(host_pages), STORAGE_BATCH_PAGES):
                batch = slice(first, first + STORAGE_BATCH_PAGES)
                payloads = host_pool.read_bytes(host_pages[batch])
                stored.extend(storage.set_linked(page_keys[batch], payloads, follows[batch]))
            return stored

        self._executor.submit_io(IoJob(future.transfer_id, run, IoLane.WRITE))
        return future

    def lookup(self, query: StorageQuery) -> TransferId:
        """Ask storage what it has of a prompt. Hashes on the worker."""
        storages = {kind: self._storage(kind) for kind in (ComponentKind.FULL, *query.companions)}
        transfer_id = self._new_id()
        self._lookups[transfer_id] = query.num_asked

        def run() -> dict[ComponentKind, dict[int, PageKey]]:
            first = query.first_page
            new_keys = query.hasher.chain(query.parent, query.tokens)
            num_found = _leading(storages[ComponentKind.FULL], new_keys)
            found = {ComponentKind.FULL: dict(enumerate(new_keys[:num_found], start=first))}
            full_keys = [*query.known_keys, *new_keys[:num_found]]
            for kind, companion in query.companions.items():
                pages = [page for page in companion.pages if page < len(full_keys)]
                keys = [companion.derive_key(full_keys[page]) for page in pages]
                there = _existing(storages[kind], keys)
                found[kind] = {p: k for p, k, ok in zip(pages, keys, there, strict=True) if ok}
            return found

        self._executor.submit_io(IoJob(transfer_id, run, IoLane.READ))
        return transfer_id

    def fetch(
        self, kind: ComponentKind, page_keys: Sequence[PageKey], host_pages: Int32Array
    ) -> TransferFuture:
        """Read pages from storage into host pages (WRITING). Only the leading run of pages that verify is kept."""
        host_pool, storage = self._io[kind].host_pool, self._storage(kind)
        future = TransferFuture(self._new_id())
        self._register(TransferKind.FETCH, kind, host_pages, future)

        def run() -> list[bool]:
            found = storage.get(page_keys)
            pages: list[PageBytes] = []
            for page in found:
                if page is None:
                    break
                pages.append(page)
            host_pool.write_bytes(host_pages[: len(pages)], pages)
            return [index < len(pages) for index in range(len(host_pages))]

        self._executor.submit_io(IoJob(future.transfer_id, run, IoLane.READ))
        return future

    def evict_callback(self, kind: ComponentKind, host_pages: Int32Array) -> None:
        """The tree has given these host pages up: free them now, or, if a transfer holds them, when it is settled."""
        pool = self._io[kind].host_pool
        locked = pool.is_locked(host_pages)
        if np.count_nonzero(locked):
            self._given_up[kind].update(host_pages[locked].tolist())
            host_pages = host_pages[~locked]
        pool.free(host_pages)

    def release(self, kind: ComponentKind, host_pages: Int32Array) -> None:
        """Undo a lock that the tree itself took on host pages; what it gave up meanwhile is freed."""
        self._io[kind].host_pool.unlock(host_pages)
        self._free_given_up(kind, host_pages)

    # -- settling ----------------------------------------------------------------------------------------------------

    def poll(self) -> list[Settled]:
        """Settle what has ended and hand each result out once. Never blocks."""
        self._collect()
        settled, self._settled = self._settled, []
        return settled

    def wait(self, future: TransferFuture, timeout_s: float) -> bool:
        """Block until `future` is settled; False at the time limit. Other results wait for the next `poll`."""
        deadline = self._clock() + timeout_s
        self._collect()
        while not future.done():
            remaining_s = deadline - self._clock()
            if remaining_s <= 0 or not self._executor.wait_any(remaining_s):
                self._collect()
                return future.done()
            self._collect()
        return True

    def wait_any(self, timeout_s: float) -> bool:
        """Block until `poll` has something to hand out, or the time limit."""
        return bool(self._settled) or self._executor.wait_any(timeout_s)

    def drain(self, deadline_s: float) -> bool:
        """Wait until nothing is in flight; what has ended is settled and waits for `poll`. False at the time limit."""
        drained = self._executor.drain(deadline_s)
        self._collect()
        return drained

    def shutdown(self, deadline_s: float) -> bool:
        """Stop the workers and close the storages. True if every worker ended in time; later results are ignored."""
        ended = self._executor.shutdown(deadline_s)
        self._collect()
        if ended:
            for io in self._io.values():
                if io.storage is not None:
                    io.storage.close()
        return ended

    # -- diagnosis ---------------------------------------------------------------------------------------------------

    def get_cpu_copy(
        self, kind: ComponentKind, device_pages: Int32Array, dp_rank: int = 0
    ) -> npt.NDArray[np.uint8]:
        """uint8[num_pages, page_bytes] copies of device pages, synchronously. For dumps and tests, not for serving."""
        return self._io[kind].transfer.read_rows(device_pages, dp_rank)

    def load_cpu_copy(
        self,
        kind: ComponentKind,
        copies: npt.NDArray[np.uint8],
        device_pages: Int32Array,
        dp_rank: int = 0,
    ) -> None:
        """Write what `get_cpu_copy` returned into device pages, synchronously. For dumps and tests."""
        self._io[kind].transfer.write_rows(device_pages, copies, dp_rank)

    def check_invariants(self) -> None:
        """Every page in flight is locked; everything given up is held by somebody who will free it."""
        for kind, io in self._io.items():
            io.host_pool.check_invariants()
            in_flight = {
                page
                for pending in self._pending.values()
                if pending.component is kind
                for page in pending.host_pages.tolist()
            }
            if in_flight:
                pages = np.fromiter(in_flight, np.int32)
                if not io.host_pool.is_locked(pages).all():
                    raise InvariantError(f"{kind.value}: pages in flight are not locked: {pages}")
            given_up = np.array(sorted(self._given_up[kind]), np.int32)
            if not io.host_pool.is_locked(given_up).all():
                raise InvariantError(f"{kind.value}: given-up pages that nobody holds: {given_up}")
        backup_bytes = sum(
            p.num_bytes for p in self._pending.values() if p.kind is TransferKind.BACKUP
        )
        if backup_bytes != self._backup_bytes:
            raise InvariantError(f"backups hold {backup_bytes} bytes, counted {self._backup_bytes}")

    # -- inside ------------------------------------------------------------------------------------------------------

    def _storage(self, kind: ComponentKind) -> HiCacheStorage:
        storage = self._io[kind].storage
        if storage is None:
            raise StorageUnavailableError(f"{kind.value} has no storage")
        return storage

    def _new_id(self) -> TransferId:
        self._next_id += 1
        return TransferId(self._next_id)

    def _num_bytes(self, kind: ComponentKind, num_pages: int) -> int:
        return num_pages * self._io[kind].host_pool.layout.page_bytes

    def _register(
        self,
        transfer_kind: TransferKind,
        kind: ComponentKind,
        host_pages: Int32Array,
        future: TransferFuture,
    ) -> None:
        """Lock the pages and remember the transfer, before anything is submitted."""
        self._io[kind].host_pool.lock(host_pages)
        self._remember(transfer_kind, kind, host_pages, future)

    def _remember(
        self,
        transfer_kind: TransferKind,
        kind: ComponentKind,
        host_pages: Int32Array,
        future: TransferFuture,
    ) -> None:
        num_bytes = self._num_bytes(kind, len(host_pages))
        self._pending[future.transfer_id] = _Pending(
            transfer_kind, kind, host_pages, num_bytes, future
        )

    def _collect(self) -> None:
        for completion in self._executor.poll():
            if completion.transfer_id in self._lookups:
                self._settle_lookup(completion)
            else:
                self._settle(completion)

    def _settle_lookup(self, completion: Completion) -> None:
        num_asked = self._lookups.pop(completion.transfer_id)
        found = completion.value if completion.error is None else {}
        self._settled.append(
            LookupResult(
                completion.transfer_id, found, num_asked, completion.error, completion.seconds
            )
        )

    def _settle(self, completion: Completion) -> None:
        pending = self._pending.pop(completion.transfer_id)
        pool = self._io[pending.component].host_pool
        ok = np.zeros(len(pending.host_pages), bool)
        if completion.error is None:
            ok[:] = completion.value
        num_ok = int(np.count_nonzero(ok))
        pool.unlock(pending.host_pages)
        if pending.kind is TransferKind.BACKUP:
            self._backup_bytes -= pending.num_bytes
        if pending.kind in (TransferKind.BACKUP, TransferKind.FETCH):
            pool.mark_ready(pending.host_pages[ok])
        if pending.kind is TransferKind.STORE:
            # One bad page is that page's trouble; a storage that takes none is the storage's.
            self._backoff[pending.component].record(num_ok > 0 or not len(ok))
        self._free_given_up(pending.component, pending.host_pages)
        result = TransferResult(
            transfer_id=completion.transfer_id,
            kind=pending.kind,
            component=pending.component,
            host_pages=tuple(pending.host_pages.tolist()),
            ok_pages=tuple(ok.tolist()),
            error=completion.error,
            num_bytes=self._num_bytes(pending.component, num_ok),
            seconds=completion.seconds,
        )
        if pending.future is not None:
            pending.future.result = result
        self._settled.append(result)

    def _free_given_up(self, kind: ComponentKind, host_pages: Int32Array) -> None:
        """Free those of the pages that the tree gave up meanwhile and that nobody holds any more."""
        given_up = self._given_up[kind]
        if not given_up:
            return
        pool = self._io[kind].host_pool
        gone = np.array([p for p in host_pages.tolist() if p in given_up], np.int32)
        gone = gone[~pool.is_locked(gone)]
        given_up.difference_update(gone.tolist())
        pool.free(gone)


def _existing(storage: HiCacheStorage, page_keys: Sequence[PageKey]) -> list[bool]:
    """Which of the pages storage has."""
    there: list[bool] = []
    for first in range(0, len(page_keys), STORAGE_BATCH_PAGES):
        there += storage.exists(page_keys[first : first + STORAGE_BATCH_PAGES])
    return there


def _leading(storage: HiCacheStorage, page_keys: Sequence[PageKey]) -> int:
    """How many pages storage has from the first on."""
    for first in range(0, len(page_keys), STORAGE_BATCH_PAGES):
        there = storage.exists(page_keys[first : first + STORAGE_BATCH_PAGES])
        if not all(there):
            return first + there.index(False)
    return len(page_keys)


def describe(error: BaseException) -> str:
    """An exception as one line of text."""
    return f"{type(error).__name__}: {error}"
