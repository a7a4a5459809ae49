"""Moves pages between the tiers. The tree decides what moves; this module moves it.

Bytes go device -> host -> storage on backup and storage -> host -> device on load. One scheduler step:

    poll -> settle -> match -> plan load -> submit load -> forward -> insert -> submit backup

Only `poll` (settle) changes a page's state because a transfer ended (`in_flight`). Every method is called on the
scheduler thread, which owns the device buffers; workers touch only gathered copies, host pages and files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .async_impl import Completion, DeviceJob, IoJob, IoLane, TransferExecutor
from .chunks import bucket_sizes
from .errors import InvariantError, StorageAttachError, StorageUnavailableError
from .host_pool.base import HostKVPool
from .in_flight import InFlight, LoadFuture, Settled, TransferFuture
from .storage.base import HiCacheStorage, PageBytes
from .storage.stats import StorageStats
from .storage_backoff import StorageBackoff
from .storage_mount import DetachedStorage, StorageMount
from .storage_query import STORAGE_BATCH_PAGES, StorageQuery
from .transfer import PageTransfer
from .types import ComponentKind, PageKey, PageLink, TransferId, TransferKind, TransferResult

Int32Array = npt.NDArray[np.int32]

_PagePairs = tuple[Int32Array, Int32Array]
"""Host pages and the device pages that they get."""


@dataclass(frozen=True)
class ComponentIO:
    """The byte movers of one component: its device buffers and its host pool."""

    transfer: PageTransfer
    host_pool: HostKVPool


class HiCacheController:
    """Schedules all transfers of all components.

    `max_backup_bytes` bounds the gathered copies that wait on the device for their way to the host; `mount` is L3, if
    there is one from the start; `clock` is monotonic seconds.
    """

    def __init__(
        self,
        io: Mapping[ComponentKind, ComponentIO],
        executor: TransferExecutor,
        *,
        max_backup_bytes: int,
        mount: StorageMount | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.in_flight = InFlight({kind: held.host_pool for kind, held in io.items()})
        self._io = dict(io)
        self._executor = executor
        self._max_backup_bytes = max_backup_bytes
        self._mount = mount
        self._settled: list[Settled] = []
        self._collected: dict[tuple[ComponentKind, int], list[_PagePairs]] = {}
        self._clock = clock
        self._backoff = self._new_backoff()

    # -- what there is -----------------------------------------------------------------------------------------------

    def host_pool(self, kind: ComponentKind) -> HostKVPool:
        """The host pool of a component."""
        return self._io[kind].host_pool

    @property
    def mount(self) -> StorageMount | None:
        """L3, if there is one now."""
        return self._mount

    def storage_writable(self, kind: ComponentKind) -> bool:
        """True if there is an L3 and the component's part of it is not in its pause after a failed write."""
        return self._mount is not None and self._backoff[kind].open

    def storage_stats(self) -> dict[ComponentKind, StorageStats]:
        """What each component's storage did since it was opened, and holds; nothing without an L3."""
        return {} if self._mount is None else self._mount.census.stats()

    @property
    def num_in_flight(self) -> int:
        """Transfers and look-ups submitted and not yet handed out by `poll`, and backups collected."""
        collected = sum(map(len, self._collected.values()))
        return len(self.in_flight) + len(self._settled) + collected

    @property
    def num_moving_down(self) -> int:
        """Backups and stores under way."""
        return self.in_flight.num_moving_down

    def now_s(self) -> float:
        """Seconds of the controller's monotonic clock."""
        return self._clock()

    def backup_fits(self, kind: ComponentKind, num_pages: int) -> bool:
        """True if the gathered copy of that many pages stays within the bound on waiting backups, or nothing waits."""
        waiting, more = self.in_flight.backup_bytes, self.in_flight.num_bytes(kind, num_pages)
        return not waiting or waiting + more <= self._max_backup_bytes

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
        self.in_flight.hold_for_backup(kind, host_pages)
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
        self.in_flight.hold_for_backup(kind, host_pages)
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

    def _start_write(
        self,
        kind: ComponentKind,
        host_pages: Int32Array,
        device_pages: Int32Array,
        dp_rank: int,
    ) -> TransferFuture:
        """Gather and submit; the host pages are held already."""
        io = self._io[kind]
        future = TransferFuture(self.in_flight.new_id())
        self.in_flight.begin(TransferKind.BACKUP, kind, host_pages, future)
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
        future = LoadFuture(self.in_flight.new_id(), device_pages, dp_rank)
        self.in_flight.begin(TransferKind.LOAD, kind, host_pages, future)
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
        *,
        again: bool = False,
    ) -> TransferFuture:
        """Write READY host pages to storage. `links`: what each page follows, where that is known; `again`: it has
        refused some of them before."""
        host_pool, storage = self._io[kind].host_pool, self._storage(kind)
        follows = links if links is not None else [None] * len(page_keys)
        future = TransferFuture(self.in_flight.new_id())
        self.in_flight.begin(TransferKind.STORE, kind, host_pages, future, again=again)

        def run() -> list[bool]:
            stored: list[bool] = []
            for first in range(0, len(host_pages), STORAGE_BATCH_PAGES):
                batch = slice(first, first + STORAGE_BATCH_PAGES)
                payloads = host_pool.read_bytes(host_pages[batch])
                answers = storage.set_linked(page_keys[batch], payloads, follows[batch])
                if len(answers) != len(payloads):
                    raise InvariantError(f"{len(payloads)} pages stored, {len(answers)} answers")
                stored.extend(answers)
            return stored

        self._executor.submit_io(IoJob(future.transfer_id, run, IoLane.WRITE))
        return future

    def lookup(self, query: StorageQuery) -> TransferId:
        """Ask storage what it has of a prompt. Hashes on the worker."""
        storages = {kind: self._storage(kind) for kind in (ComponentKind.FULL, *query.companions)}
        transfer_id = self.in_flight.begin_lookup(query.num_asked)
        self._executor.submit_io(IoJob(transfer_id, lambda: query.run(storages), IoLane.READ))
        return transfer_id

    def fetch(
        self, kind: ComponentKind, page_keys: Sequence[PageKey], host_pages: Int32Array
    ) -> TransferFuture:
        """Read pages from storage into host pages (WRITING). Only the leading run of pages that verify is kept."""
        host_pool, storage = self._io[kind].host_pool, self._storage(kind)
        future = TransferFuture(self.in_flight.new_id())
        self.in_flight.begin(TransferKind.FETCH, kind, host_pages, future)

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
        self.in_flight.give_up(kind, host_pages)

    def release(self, kind: ComponentKind, host_pages: Int32Array) -> None:
        """Undo a lock that the tree itself took on host pages; what it gave up meanwhile is freed."""
        self.in_flight.release(kind, host_pages)

    # -- storage comes and goes --------------------------------------------------------------------------------------

    def attach_storage(self, mount: StorageMount) -> None:
        """Read and write there from now on. Raises StorageAttachError if there is an L3 already."""
        if self._mount is not None:
            raise StorageAttachError(f"{self._mount.path} is attached already; detach it first")
        if self.in_flight.num_leaving:
            # The workers may be stuck in what was detached.
            self._executor.renew_io()
        self._mount = mount
        self._backoff = self._new_backoff()

    def detach_storage(self) -> DetachedStorage:
        """Begin nothing there any more; what is under way ends by itself. Raises StorageAttachError without an L3."""
        if self._mount is None:
            raise StorageAttachError("no storage is attached")
        mount, self._mount = self._mount, None
        return DetachedStorage(mount, self.in_flight.detach_storage())

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
        if ended and self._mount is not None:
            self._mount.close()
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
        """Those of the host pools and of what is under way; raises InvariantError."""
        self.in_flight.check_invariants()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _storage(self, kind: ComponentKind) -> HiCacheStorage:
        if self._mount is None:
            raise StorageUnavailableError(f"{kind.value} has no storage")
        return self._mount.storages[kind]

    def _new_backoff(self) -> dict[ComponentKind, StorageBackoff]:
        return {kind: StorageBackoff(self._clock) for kind in self._io}

    def _collect(self) -> None:
        for completion in self._executor.poll():
            self._settle(completion)

    def _settle(self, completion: Completion) -> None:
        result = self.in_flight.end(completion)
        if (
            isinstance(result, TransferResult)
            and result.kind is TransferKind.STORE
            and not result.detached
        ):
            self._backoff[result.component].record(
                any(result.ok_pages) or not result.ok_pages,
                again=result.again,
                alone=len(result.ok_pages) == 1 and result.error is None,
            )
        self._settled.append(result)


def describe(error: BaseException) -> str:
    """An exception as one line of text."""
    return f"{type(error).__name__}: {error}"
