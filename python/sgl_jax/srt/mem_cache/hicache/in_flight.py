"""What is under way, and the host pages that it holds. No bytes move here.

Host pages of a transfer are locked in their pool from before it is submitted until it has ended, so they can be neither
freed nor evicted; what the tree gives up meanwhile is freed then. Transfer ids are never reused: a late completion can
not be taken for another attempt's. What was begun with a storage that is detached meanwhile ends like anything else,
but says nothing about the storage there is now. Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .async_impl import Completion
from .errors import InvariantError
from .host_pool.base import HostKVPool
from .transfer import StagedPages
from .types import ComponentKind, LookupResult, TransferId, TransferKind, TransferResult

Int32Array = npt.NDArray[np.int32]
Settled = TransferResult | LookupResult

_OF_STORAGE = (TransferKind.STORE, TransferKind.FETCH)
_DOWN = (TransferKind.BACKUP, TransferKind.STORE)


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
class PendingTransfer:
    """A submitted transfer; its host pages are locked. `again`: storage refused some before; `detached`: it is gone."""

    kind: TransferKind
    component: ComponentKind
    host_pages: Int32Array
    num_bytes: int
    future: TransferFuture
    again: bool = False
    detached: bool = False


@dataclass(frozen=True)
class _PendingLookup:
    num_asked: int
    detached: bool = False


@dataclass(frozen=True)
class _Leaving:
    """The rest of what was begun with a storage that is detached."""

    left: set[TransferId]
    drained: Future[None]


class InFlight:
    """Transfers and look-ups between submission and end."""

    def __init__(self, host_pools: Mapping[ComponentKind, HostKVPool]) -> None:
        self._host_pools = dict(host_pools)
        self._pending: dict[TransferId, PendingTransfer] = {}
        self._lookups: dict[TransferId, _PendingLookup] = {}
        self._given_up: dict[ComponentKind, set[int]] = {kind: set() for kind in host_pools}
        self._leaving: list[_Leaving] = []
        self._next_id = 0
        self.backup_bytes = 0

    def __len__(self) -> int:
        """Transfers and look-ups that have not ended."""
        return len(self._pending) + len(self._lookups)

    @property
    def num_moving_down(self) -> int:
        """Backups, and stores to the storage there is, that have not ended."""
        return sum(p.kind in _DOWN and not p.detached for p in self._pending.values())

    @property
    def num_lookups(self) -> int:
        """Look-ups that have not ended."""
        return len(self._lookups)

    @property
    def num_leaving(self) -> int:
        """Detached storages in which something still reads or writes."""
        return len(self._leaving)

    def transfers(self) -> list[PendingTransfer]:
        """The transfers that have not ended."""
        return list(self._pending.values())

    def counts(self) -> Counter[tuple[TransferKind, ComponentKind]]:
        """How many transfers of each kind and component have not ended."""
        return Counter((p.kind, p.component) for p in self._pending.values())

    def num_bytes(self, kind: ComponentKind, num_pages: int) -> int:
        """Bytes of that many pages of a component."""
        return num_pages * self._host_pools[kind].layout.page_bytes

    # -- begin and end -----------------------------------------------------------------------------------------------

    def new_id(self) -> TransferId:
        """An id that no other transfer has or had."""
        self._next_id += 1
        return TransferId(self._next_id)

    def begin(
        self,
        transfer_kind: TransferKind,
        component: ComponentKind,
        host_pages: Int32Array,
        future: TransferFuture,
        *,
        again: bool = False,
    ) -> None:
        """Lock the pages (those of a backup are held already) and remember the transfer, before it is submitted."""
        num_bytes = self.num_bytes(component, len(host_pages))
        if transfer_kind is not TransferKind.BACKUP:
            self._host_pools[component].lock(host_pages)
        self._pending[future.transfer_id] = PendingTransfer(
            transfer_kind, component, host_pages, num_bytes, future, again
        )

    def hold_for_backup(self, component: ComponentKind, host_pages: Int32Array) -> None:
        """Lock pages that a backup will fill, and count its bytes; the backup begins later."""
        self._host_pools[component].lock(host_pages)
        self.backup_bytes += self.num_bytes(component, len(host_pages))

    def begin_lookup(self, num_asked: int) -> TransferId:
        """Remember a look-up of that many Full pages."""
        transfer_id = self.new_id()
        self._lookups[transfer_id] = _PendingLookup(num_asked)
        return transfer_id

    def end(self, completion: Completion) -> Settled:
        """A transfer or look-up has ended: its pages are unlocked, and READY if they were filled."""
        lookup = self._lookups.pop(completion.transfer_id, None)
        result = (
            self._end_transfer(completion) if lookup is None else _lookup_result(completion, lookup)
        )
        if result.detached:
            self._one_left_less(completion.transfer_id)
        return result

    def _end_transfer(self, completion: Completion) -> TransferResult:
        pending = self._pending.pop(completion.transfer_id)
        pool = self._host_pools[pending.component]
        ok = (
            tuple(map(bool, completion.value))
            if completion.error is None
            else (False,) * len(pending.host_pages)
        )
        num_ok = sum(ok)
        pool.unlock(pending.host_pages)
        if pending.kind is TransferKind.BACKUP:
            self.backup_bytes -= pending.num_bytes
        if pending.kind in (TransferKind.BACKUP, TransferKind.FETCH):
            arrived = pending.host_pages if num_ok == len(ok) else pending.host_pages[list(ok)]
            pool.mark_ready(arrived)
        self._free_given_up(pending.component, pending.host_pages)
        pending.future.result = TransferResult(
            transfer_id=completion.transfer_id,
            kind=pending.kind,
            component=pending.component,
            host_pages=tuple(pending.host_pages.tolist()),
            ok_pages=ok,
            error=completion.error,
            num_bytes=self.num_bytes(pending.component, num_ok),
            seconds=completion.seconds,
            again=pending.again,
            detached=pending.detached,
        )
        return pending.future.result

    # -- pages that the tree gives up --------------------------------------------------------------------------------

    def give_up(self, kind: ComponentKind, host_pages: Int32Array) -> None:
        """Nobody wants these host pages: free them now, or, if somebody holds them, when nobody does any more."""
        pool = self._host_pools[kind]
        if pool.any_locked(host_pages):
            locked = pool.is_locked(host_pages)
            self._given_up[kind].update(host_pages[locked].tolist())
            host_pages = host_pages[~locked]
        pool.free(host_pages)

    def release(self, kind: ComponentKind, host_pages: Int32Array) -> None:
        """Undo a lock that the tree itself took on host pages; what it gave up meanwhile is freed."""
        self._host_pools[kind].unlock(host_pages)
        self._free_given_up(kind, host_pages)

    def _free_given_up(self, kind: ComponentKind, host_pages: Int32Array) -> None:
        """Free those of the pages that the tree gave up meanwhile and that nobody holds any more."""
        given_up = self._given_up[kind]
        if not given_up:
            return
        pool = self._host_pools[kind]
        gone = np.array([p for p in host_pages.tolist() if p in given_up], np.int32)
        gone = gone[~pool.is_locked(gone)]
        given_up.difference_update(gone.tolist())
        pool.free(gone)

    # -- a storage that goes -----------------------------------------------------------------------------------------

    def detach_storage(self) -> Future[None]:
        """What was begun with the storage belongs to none any more. Done when all of it has ended."""
        left: set[TransferId] = set()
        for transfer_id, pending in self._pending.items():
            if pending.kind in _OF_STORAGE and not pending.detached:
                self._pending[transfer_id] = replace(pending, detached=True)
                left.add(transfer_id)
        for transfer_id, lookup in self._lookups.items():
            if not lookup.detached:
                self._lookups[transfer_id] = replace(lookup, detached=True)
                left.add(transfer_id)
        drained: Future[None] = Future()
        if left:
            self._leaving.append(_Leaving(left, drained))
        else:
            drained.set_result(None)
        return drained

    def _one_left_less(self, transfer_id: TransferId) -> None:
        for leaving in self._leaving:
            leaving.left.discard(transfer_id)
            if not leaving.left:
                leaving.drained.set_result(None)
        self._leaving = [leaving for leaving in self._leaving if leaving.left]

    # -- checks ------------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Every page in flight is locked; everything given up is held by somebody who will free it."""
        for kind, pool in self._host_pools.items():
            pool.check_invariants()
            in_flight = {
                page
                for pending in self._pending.values()
                if pending.component is kind
                for page in pending.host_pages.tolist()
            }
            if in_flight:
                pages = np.fromiter(in_flight, np.int32)
                if not pool.is_locked(pages).all():
                    raise InvariantError(f"{kind.value}: pages in flight are not locked: {pages}")
            given_up = np.array(sorted(self._given_up[kind]), np.int32)
            if not pool.is_locked(given_up).all():
                raise InvariantError(f"{kind.value}: given-up pages that nobody holds: {given_up}")
        backup_bytes = sum(
            p.num_bytes for p in self._pending.values() if p.kind is TransferKind.BACKUP
        )
        if backup_bytes != self.backup_bytes:
            raise InvariantError(f"backups hold {backup_bytes} bytes, counted {self.backup_bytes}")


def _lookup_result(completion: Completion, lookup: _PendingLookup) -> LookupResult:
    found = completion.value if completion.error is None and not lookup.detached else {}
    return LookupResult(
        transfer_id=completion.transfer_id,
        found=found,
        num_asked=lookup.num_asked,
        error=completion.error,
        seconds=completion.seconds,
        detached=lookup.detached,
    )
