"""The host and storage tiers as the tree uses them: carries out the components' plans and finds room for them.

The tree asks the components what should move (their hooks) and hands the plans to this module, which allocates host
pages, evicts others to make room, submits transfers to the controller and, when they are settled, tells the tree which
nodes changed. Scheduler thread only; nothing here blocks except `wait_loads`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from .components.base import BackupPlan, PrefetchPlan, StorePlan, TreeComponent
from .controller import HiCacheController
from .host_pool.base import HostKVPool
from .in_flight import LoadFuture
from .metrics import HiCacheMetrics
from .storage_mount import DetachedStorage, StorageMount
from .storage_query import STORAGE_BATCH_PAGES
from .tree_node import TreeNode
from .types import ComponentKind, LookupResult, Tier, TransferKind, TransferResult

Int32Array = npt.NDArray[np.int32]

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 30.0
"""A load that takes longer is given up and its request recomputes; far above any healthy transfer."""

STORAGE_REPORT_INTERVAL_S = 1.0

VICTIMS_LOOKED_AT = 64
"""Nodes looked at beyond those that must suffice, so that a few that cannot go do not stop eviction."""

VICTIMS_AT_FIRST = 8
"""As many of those that only the host has are looked at first: as a rule they suffice."""

CLEAN_RESERVE = 0.25
"""Share of the host pool that write-back keeps free or stored, so that eviction finds pages it may drop at once."""


NodePart = tuple[TreeNode, TreeComponent]
"""What one component keeps on one node."""


@dataclass
class Settlement:
    """What ended since the last poll, in order.

    backed_up: whose host copy is complete now; lost: whose copy failed; unstored: of which storage did not take every
    page; look-ups and fetches are passed on.
    """

    backed_up: dict[NodePart, None] = field(default_factory=dict)
    lost: dict[NodePart, None] = field(default_factory=dict)
    unstored: dict[NodePart, None] = field(default_factory=dict)
    lookups: list[LookupResult] = field(default_factory=list)
    fetches: list[TransferResult] = field(default_factory=list)


@dataclass(frozen=True)
class HostVictim:
    """A node that may lose its host pages, all but the first `keep_pages` of them."""

    node: TreeNode
    keep_pages: int


@dataclass(frozen=True)
class HostVictims:
    """What host eviction found: `clean` may be dropped now, `dirty` only after they were written to storage."""

    clean: tuple[HostVictim, ...]
    dirty: tuple[TreeNode, ...]


class LowerTiers:
    """L2 and L3 of one tree."""

    def __init__(
        self,
        components: Sequence[TreeComponent],
        controller: HiCacheController,
        metrics: HiCacheMetrics,
    ) -> None:
        self.controller = controller
        self._components: Mapping[ComponentKind, TreeComponent] = {c.kind: c for c in components}
        self._metrics = metrics
        self._device_pages: dict[ComponentKind, int] = {}  # as last reported, like the next two
        self._host_free: dict[ComponentKind, int] = {}
        self._in_flight: Counter[tuple[TransferKind, ComponentKind]] = Counter()
        self._storage_report_due_s = 0.0
        self._metrics.storage_attached(controller.storage_stats())
        self.report()

    def host_pool(self, kind: ComponentKind) -> HostKVPool:
        """The host pool of a component."""
        return self.controller.host_pool(kind)

    # -- backup ------------------------------------------------------------------------------------------------------

    def has_room(self, kind: ComponentKind, num_pages: int) -> bool:
        """True if that many host pages are free."""
        return self.controller.host_pool(kind).num_free >= num_pages

    def backup_fits(self, plan: BackupPlan) -> bool:
        """False if too much waits to be copied already; asked before room is made for the copy."""
        return self.controller.backup_fits(plan.component, len(plan.device_pages))

    def backup(self, plan: BackupPlan) -> bool:
        """Have a node copied to the host, begun by `start_backups`. False, and nothing changed, if there is no room."""
        host_pages = self.controller.host_pool(plan.component).alloc(len(plan.device_pages))
        if host_pages is None:
            return False
        component = self._components[plan.component]
        component.host.attach(plan.node, host_pages.copy(), stored=False)
        self.controller.collect_write(
            plan.component, host_pages, plan.device_pages, plan.node.namespace.dp_rank
        )
        return True

    @property
    def has_backups(self) -> bool:
        """True if `start_backups` has something to begin."""
        return self.controller.has_collected

    def start_backups(self) -> None:
        """Begin the backups that were asked for, of each component and rank as one transfer."""
        self.controller.start_writes()

    def adopt(self, component: TreeComponent, node: TreeNode, host_pages: Int32Array) -> None:
        """Give `node` pages that were fetched from storage."""
        component.host.attach(node, host_pages, stored=True)

    # -- eviction ----------------------------------------------------------------------------------------------------

    def find_victims(self, component: TreeComponent, num_pages: int) -> HostVictims:
        """Choose whose host pages of a component go so that `num_pages` are free, as far as possible. Frees nothing.

        First the least recently used nodes that are on the device too (nothing is lost), then nodes whose pages storage
        has or, when no storage can take them, that nothing can save. Nodes in transfer are passed over. A node that
        loses its last Full pages leaves the tree with all that is on it: those must be leaves, all of it must be
        stored, and only as many pages go as are needed, from its end.
        """
        pool = self.controller.host_pool(component.kind)
        short = max(num_pages - pool.num_free, 0)
        num_in_use = pool.num_pages - pool.num_free - pool.num_evictable
        limit = short + num_in_use + VICTIMS_LOOKED_AT  # each node in transfer has a page in use
        few = short + VICTIMS_AT_FIRST
        victims, is_enough = self._choose_victims(component, short, limit, few)
        if not is_enough:
            victims, _ = self._choose_victims(component, short, limit, limit)
        return victims

    def _choose_victims(
        self, component: TreeComponent, short: int, num_mirrors: int, num_sole: int
    ) -> tuple[HostVictims, bool]:
        """`find_victims` among so many nodes that are on the device too, and so many that only the host has; and
        whether they suffice."""
        pool = self.controller.host_pool(component.kind)
        is_full = component.kind is ComponentKind.FULL
        clean: list[HostVictim] = []
        dirty: list[TreeNode] = []
        sole = (
            self._oldest_leaves(component, num_sole)
            if is_full
            else component.host.oldest_sole(num_sole)
        )
        for node in chain(component.host.oldest_mirrors(num_mirrors), sole):
            pages = component.data(node).host_pages
            if short <= 0 or pages is None:
                break
            on_device = component.data(node).device_slots is not None
            if not on_device and not self._expendable(component, node):
                dirty.append(node)
            elif not pool.any_locked(pages):
                # A node on the device is not cut: that would change its place in the order of device eviction.
                cut = is_full and not on_device
                clean.append(HostVictim(node, max(len(pages) - short, 0) if cut else 0))
                short -= len(pages)
        return HostVictims(tuple(clean), tuple(dirty)), short <= 0

    def _expendable(self, component: TreeComponent, node: TreeNode) -> bool:
        """True if storage has, or does not take, what would be lost with the node's pages of this component."""
        leaving = (
            self._components.values() if component.kind is ComponentKind.FULL else (component,)
        )
        return not any(
            pages is not None and self.storage_writable(lost) and not lost.host.is_settled(pages)
            for lost in leaving
            for pages in (lost.data(node).host_pages,)
        )

    def _oldest_leaves(self, component: TreeComponent, limit: int) -> list[TreeNode]:
        """The leaves among the oldest host-only nodes. A node with children can not leave before them and was used no
        earlier than they were: it is moved on, so that such nodes can never fill the end of the order."""
        while True:
            oldest = component.host.oldest_sole(limit)
            leaves = [node for node in oldest if not node.children]
            for node in oldest:
                if node.children:
                    component.host.touch(node)
            if leaves or len(oldest) < limit:
                return leaves

    def oldest_unstored(self, component: TreeComponent, *, again: bool) -> list[TreeNode]:
        """Nodes to write to storage now so that the reserve of droppable pages is kept; oldest first. `again`: also
        what it refused before."""
        pool = self.controller.host_pool(component.kind)
        want = int(pool.num_pages * CLEAN_RESERVE) - pool.num_free
        found: list[TreeNode] = []
        if want <= 0 or not self.storage_writable(component):
            return found
        for node in component.host.oldest_sole(VICTIMS_LOOKED_AT):
            pages = component.data(node).host_pages
            if want <= 0 or pages is None:
                break
            if not component.host.is_settled(pages) and component.host.lacking(pages):
                if component.host.any_refused(pages) and not again:
                    continue
                found.append(node)
            want -= len(pages)
        return found

    def drop_host(self, component: TreeComponent, node: TreeNode) -> None:
        """Take the node's host pages, whatever uses them now: a transfer under way keeps them until it ends."""
        pages = component.host.detach(node)
        component.data(node).in_storage = component.host.all_stored(pages)
        self._count_dropped(component, node, pages)
        self.controller.evict_callback(component.kind, pages)

    def give_up(self, kind: ComponentKind, host_pages: Int32Array) -> None:
        """Give back host pages that no node owns."""
        self.controller.evict_callback(kind, host_pages)

    # -- storage -----------------------------------------------------------------------------------------------------

    def store(self, plans: Iterable[StorePlan]) -> None:
        """Start writing pages to storage: of each component one transfer for every storage batch, so that the workers
        share them. No plan is in two of them. What was refused goes by itself: what fails because of one page is no
        fault of the others."""
        batches: dict[ComponentKind, list[StorePlan]] = {}
        for plan in plans:
            if self._components[plan.component].host.any_refused(plan.host_pages):
                self._start_store(plan.component, [plan], again=True)
                continue
            batch = batches.setdefault(plan.component, [])
            batch.append(plan)
            if sum(len(waiting.host_pages) for waiting in batch) >= STORAGE_BATCH_PAGES:
                self._start_store(plan.component, batches.pop(plan.component))
        for kind, batch in batches.items():
            self._start_store(kind, batch)

    def _start_store(
        self, kind: ComponentKind, plans: Sequence[StorePlan], *, again: bool = False
    ) -> None:
        self.controller.store(
            kind,
            np.concatenate([plan.host_pages for plan in plans]),
            [key for plan in plans for key in plan.page_keys],
            [link for plan in plans for link in plan.links],
            again=again,
        )

    def storage_writable(self, component: TreeComponent) -> bool:
        """True if there is an L3 that takes the component's pages now."""
        return self.controller.storage_writable(component.kind)

    def attach_storage(self, mount: StorageMount) -> None:
        """L3 is there from now on. Raises StorageAttachError if there is one already."""
        self.controller.attach_storage(mount)
        logger.info("HiCache: L3 storage %s is attached", mount.path)
        self._metrics.storage_attached(self.controller.storage_stats())
        self.report()

    def detach_storage(self) -> DetachedStorage:
        """L3 is gone, and with it the knowledge of what it has. Raises StorageAttachError if there is none."""
        self.report()
        detached = self.controller.detach_storage()
        for component in self._components.values():
            component.host.forget_storage()
        self._metrics.storage_detached()
        logger.info("HiCache: L3 storage %s is detached", detached.mount.path)
        return detached

    # -- load --------------------------------------------------------------------------------------------------------

    def load(self, plan: PrefetchPlan, device_pages: Int32Array, dp_rank: int) -> LoadFuture:
        """Start bringing the plan's host pages to the device."""
        return self.controller.load(plan.component, device_pages, plan.host_pages, dp_rank)

    def wait_loads(self, futures: Sequence[LoadFuture]) -> bool:
        """Wait for loads; False if one failed or took too long."""
        deadline = self.controller.now_s() + LOAD_TIMEOUT_S
        for future in futures:
            if not self.controller.wait(future, deadline - self.controller.now_s()):
                return False
        return all(future.result is not None and future.result.ok for future in futures)

    # -- settling ----------------------------------------------------------------------------------------------------

    def settle(self) -> Settlement:
        """Collect what ended and say what it means for the tree."""
        settlement = Settlement()
        for result in self.controller.poll():
            if isinstance(result, LookupResult):
                self._metrics.lookup_ended(result)
                settlement.lookups.append(result)
                continue
            self._metrics.transfer(result)
            component = self._components[result.component]
            if result.kind is TransferKind.BACKUP:
                self._settle_backup(component, result, settlement)
            elif result.kind is TransferKind.STORE and not result.detached:
                component.host.store_ended(
                    result.host_pages,
                    result.ok_pages,
                    storage_works=self.storage_writable(component),
                )
                for node in component.host.owners(result.failed_pages):
                    settlement.unstored[node, component] = None
            elif result.kind is TransferKind.FETCH:
                settlement.fetches.append(result)
        self.report(storage=not len(self.controller.in_flight))
        return settlement

    def report_pages(self) -> None:
        """Bring the gauges of device and host up to date, with or without a transfer. Cheap if nothing changed."""
        for kind, component in self._components.items():
            num_pages, pool = component.num_device_pages(), self.host_pool(kind)
            if num_pages != self._device_pages.get(kind):
                self._device_pages[kind] = num_pages
                self._metrics.device_pages(kind, num_pages)
            if pool.num_free != self._host_free.get(kind):
                self._host_free[kind] = pool.num_free
                self._metrics.host_pages(kind, pool.num_pages - pool.num_free, pool.num_pages)

    def report(self, *, storage: bool = True) -> None:
        """Bring gauges up to date, and storage counters: those of `storage` only if they were not a moment ago."""
        in_flight = self.controller.in_flight
        counts = in_flight.counts()
        for labels in counts.keys() | self._in_flight.keys():
            if counts[labels] != self._in_flight[labels]:
                self._metrics.in_flight(*labels, counts[labels])
        self._in_flight = counts
        self.report_pages()
        self._metrics.lookups_in_flight(in_flight.num_lookups)
        if storage:
            self._report_storage()
        else:
            self.report_storage()

    def report_storage(self) -> None:
        """Bring what storage says up to date if it was not a moment ago: its pages are counted while nothing is under
        way, too."""
        if self.controller.now_s() >= self._storage_report_due_s:
            self._report_storage()

    def _report_storage(self) -> None:
        self._storage_report_due_s = self.controller.now_s() + STORAGE_REPORT_INTERVAL_S
        for kind, stats in self.controller.storage_stats().items():
            self._metrics.storage(kind, stats)

    def shutdown(self, deadline_s: float) -> bool:
        """Stop the workers; False if one did not end in time. What ended by then is settled and in the metrics."""
        ended = self.controller.shutdown(deadline_s)
        self.settle()
        return ended

    def _settle_backup(
        self, component: TreeComponent, result: TransferResult, settlement: Settlement
    ) -> None:
        """Every fragment that the node was cut into since is looked at: pages know their owners."""
        lost = component.host.owners(result.failed_pages)
        for node in component.host.owners(result.host_pages):
            ended = settlement.lost if node in lost else settlement.backed_up
            ended[node, component] = None

    # -- inside ------------------------------------------------------------------------------------------------------

    def _count_dropped(self, component: TreeComponent, node: TreeNode, pages: Int32Array) -> None:
        self._metrics.evicted(Tier.HOST, component.kind, len(pages))
        if component.data(node).device_slots is None:
            lost = len(pages) - component.host.num_stored(pages.tolist())
            self._metrics.dropped(Tier.HOST, component.kind, lost)
