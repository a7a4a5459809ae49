"""The prefix tree with its tiers: what happens to a node's pages when the tree changes.

Here, and nowhere else, the components' hooks are called: write_through when nodes are on the device and may lack a
host copy, write_back when pages must be safe in storage, prefetch when a prefix is about to be used. `LowerTiers`
carries their plans out. `UnifiedRadixCache` puts the engine's contract on top. Scheduler thread only; nothing blocks
but `load` and `flush`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from .components.base import BackupPlan, PrefetchPlan, PrefetchRequest, TreeComponent
from .components.full import FullComponent, device_pages_of
from .contract import DonationBarrier, TokenToKVPoolAllocator
from .controller import LoadFuture
from .lower_tiers import HostVictim, LowerTiers
from .metrics import HiCacheMetrics
from .radix_tree import RadixTree
from .token_key import TokenCodec
from .tree_node import KeyNamespace, TreeNode
from .types import LookupResult, PageKey, Tier, TransferId, TransferResult

Int32Array = npt.NDArray[np.int32]

NO_SLOTS: Int32Array = np.empty(0, np.int32)

STORE_RETRY_S = 1.0
STORE_RETRY_NODES = 64
STORE_RETRIES = 3
"""What storage did not take is written again: so many nodes at a time, not more often than that, and no node more often
than that; a flush, its eviction or a longer prompt try once more."""


@dataclass(frozen=True)
class PendingLoad:
    """A loaded prefix whose pages are on the device but not yet in its buffers.

    Until they are, its nodes are locked, and so are the host pages they came from: a node keeps its host copy, so that
    nobody makes a new one from slots that hold nothing yet.
    """

    future: LoadFuture
    node: TreeNode
    host_pages: Int32Array
    epoch: int


class TieredTree:
    """Nodes, their components' pages on every tier, and the moves between tiers.

    `tiers` is None without a host. `store_early`: storage gets a page as soon as the host copy is complete
    (write_through), else when the page is to leave the host.
    """

    def __init__(
        self,
        *,
        codec: TokenCodec,
        full: FullComponent,
        allocator: TokenToKVPoolAllocator,
        metrics: HiCacheMetrics,
        tiers: LowerTiers | None,
        store_early: bool,
    ) -> None:
        self.full = full
        self.components: tuple[TreeComponent, ...] = (full,)
        self.tree = RadixTree(codec, len(self.components))
        self.donation_barrier: DonationBarrier | None = None
        self.epoch = 0
        self._codec = codec
        self._page_size = codec.page_size
        self._allocator = allocator
        self._metrics = metrics
        self._tiers = tiers
        self._store_early = store_early
        # Tokens; 0 without a host.
        self._longest_node = (
            tiers.controller.host_pool(full.kind).num_pages * codec.page_size if tiers else 0
        )
        self._reserve_may_lack = True
        self._unstored: dict[TreeNode, int] = {}  # node -> times that storage refused some of it
        self._retry_at_s = 0.0
        self._lookups: list[LookupResult] = []
        self._fetches: list[TransferResult] = []

    @property
    def tiers(self) -> LowerTiers:
        """The lower tiers; only called where a page of theirs is at hand."""
        if self._tiers is None:
            raise LookupError("there are no lower tiers")
        return self._tiers

    @property
    def has_tiers(self) -> bool:
        """True if there is a host tier."""
        return self._tiers is not None

    @property
    def has_storage(self) -> bool:
        """True if there is a storage tier."""
        return self._tiers is not None and self._tiers.controller.has_storage(self.full.kind)

    # -- structure ---------------------------------------------------------------------------------------------------

    def path_of(self, namespace: KeyNamespace, key: bytes) -> list[TreeNode]:
        """The nodes along `key`, as far as the tree goes; a node that matches in part is split."""
        walk = self.tree.walk(namespace, key)
        if walk.partial is not None:
            walk.path.append(self.split(walk.partial, walk.partial_tokens))
            self.touch(walk.path[-1])
        return walk.path

    def cut(self, path: list[TreeNode], num_tokens: int) -> list[TreeNode]:
        """The part of `path` that holds its first `num_tokens` tokens; splits the node across the border, if any."""
        end = 0
        for index, node in enumerate(path):
            if end == num_tokens:
                return path[:index]
            if end + node.num_tokens > num_tokens:
                return [*path[:index], self.split(node, num_tokens - end)]
            end += node.num_tokens
        return path

    def split(self, node: TreeNode, num_tokens: int) -> TreeNode:
        """Cut `node`; the new upper part is returned, `node` stays the lower part."""
        upper = self.tree.split(node, num_tokens)
        for component in self.components:
            component.split(upper, node)
        return upper

    def touch(self, node: TreeNode) -> None:
        """The prefix that ends at `node` was used."""
        for component in self.components:
            component.touch(node)

    def device_slots(self, path: Sequence[TreeNode]) -> Int32Array:
        """int32[tokens of path] device slots, a copy."""
        slots = [s for n in path if (s := n.data[self.full.index].device_slots) is not None]
        return np.concatenate(slots) if slots else NO_SLOTS

    def on_device(self, node: TreeNode) -> bool:
        """True if the node has device slots."""
        return node.data[self.full.index].device_slots is not None

    # -- device ------------------------------------------------------------------------------------------------------

    def add_device_leaves(
        self, parent: TreeNode, namespace: KeyNamespace, key: bytes, device_slots: Int32Array
    ) -> list[TreeNode]:
        """New nodes below `parent` whose pages are on the device: one, or, because a node is backed up whole, a chain
        of nodes that each fit into the host pool."""
        added: list[TreeNode] = []
        num_tokens = self._longest_node or len(device_slots)
        for start in range(0, len(device_slots), num_tokens):
            slots = device_slots[start : start + num_tokens]
            first = start * self._codec.token_bytes
            part = key[first : first + len(slots) * self._codec.token_bytes]
            parent = self.tree.add_child(parent, namespace, part)
            self.attach_device(parent, slots)
            added.append(parent)
        return added

    def attach_device(self, node: TreeNode, device_slots: Int32Array) -> None:
        """`node` takes over these slots."""
        self.full.device.attach(node, device_slots.astype(np.int32, copy=True))
        self.full.host.device_changed(node)

    def free_device(self, device_slots: Int32Array, dp_rank: int) -> None:
        """Give slots back to the engine's allocator."""
        if len(device_slots):
            self._allocator.free(device_slots, dp_rank=dp_rank)

    def evict_device(self, num_tokens: int, dp_rank: int) -> int:
        """Free at least `num_tokens` if that many are evictable; return how many were freed."""
        freed = 0
        while freed < num_tokens:
            node = self.full.device.oldest(dp_rank)
            if node is None:
                break
            freed += self._evict_node(node, num_tokens - freed)
        if freed:
            self._metrics.evicted(Tier.DEVICE, freed // self._page_size)
        return freed

    def _evict_node(self, node: TreeNode, num_tokens: int) -> int:
        """Take `node`, or as many of its last pages as hold `num_tokens`, off the device.

        A node whose host copy is complete or on the way just loses its slots; one without is copied first, if there is
        room. One that ends up on no tier leaves the tree, with what hangs below it.
        """
        keep = (node.num_tokens - num_tokens) // self._page_size * self._page_size
        upper = self.split(node, keep) if keep > 0 else None
        plan = self.full.write_through(node)
        if plan is not None:
            self._backup(plan)
        slots = self.full.device.detach(node)
        self.full.host.device_changed(node)
        self._reserve_may_lack = True
        if upper is not None:
            self.full.device.age(upper)
        self.free_device(slots, node.namespace.dp_rank)
        if node.data[self.full.index].host_pages is None:
            self.remove_subtree(node)
        return len(slots)

    # -- device -> host ----------------------------------------------------------------------------------------------

    def write_through(self, path: Sequence[TreeNode]) -> None:
        """Start the backup of every node of the path that has none, from the top: a child is of use only with what lies
        above it. Stops where there is no room; eviction or the next insert tries again."""
        for node in path:
            for component in self.components:
                plan = component.write_through(node)
                if plan is not None and not self._backup(plan):
                    return

    def _backup(self, plan: BackupPlan) -> bool:
        component = next(c for c in self.components if c.kind is plan.component)
        if not self._make_host_room(component, len(plan.device_pages)):
            return False
        if self.donation_barrier is not None:
            self.donation_barrier()
        return self.tiers.backup(plan)

    def _make_host_room(self, component: TreeComponent, num_pages: int) -> bool:
        """Evict host pages until `num_pages` are free, as far as that is possible without waiting."""
        while not self.tiers.has_room(component.kind, num_pages):
            victims = self.tiers.find_victims(component.kind, num_pages)
            for victim in victims.clean:
                self._drop_victim(component, victim)
            for node in victims.dirty:
                if node.parent is not None:
                    self._write_back(component, node)
            if not victims.clean:
                return False
        return True

    def _drop_victim(self, component: TreeComponent, victim: HostVictim) -> None:
        node = victim.node
        upper = None
        if victim.keep_pages:
            upper = self.split(node, victim.keep_pages * self._page_size)
        self.tiers.drop_host(component, node)
        if not self.on_device(node):
            self.tree.remove(node)
        if upper is not None:
            component.host.age(upper)

    def remove_subtree(self, top: TreeNode) -> None:
        """Take a node and all below it, none of which is on the device, out of the tree."""
        stack, order = [top], []
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(node.children.values())
        for node in reversed(order):
            for component in self.components:
                if node.data[component.index].host_pages is not None:
                    self.tiers.drop_host(component, node)
            self.tree.remove(node)

    # -- host -> storage ---------------------------------------------------------------------------------------------

    def _write_back(self, component: TreeComponent, node: TreeNode) -> bool:
        """Start writing to storage what it lacks of the path down to `node`; False if it lacks nothing."""
        plan = component.write_back(node)
        if plan is not None:
            self.tiers.store(plan)
        return plan is not None

    def keep_reserve(self) -> None:
        """With the lazy policy: write the oldest pages to storage ahead of need, so that eviction need not wait. Looks
        only if something changed since it last found nothing to do."""
        if self._store_early or not self._reserve_may_lack or not self.has_storage:
            return
        self._reserve_may_lack = False
        for component in self.components:
            for node in self.tiers.oldest_unstored(component.kind):
                self._reserve_may_lack |= self._write_back(component, node)

    def retry_stores(self) -> None:
        """With the early policy: write again what storage did not take, a few nodes at a time."""
        now_s = self.tiers.controller.now_s() if self._unstored else 0.0
        if not self._unstored or now_s < self._retry_at_s or not self._storage_writable():
            return
        self._retry_at_s = now_s + STORE_RETRY_S
        for node in list(islice(self._unstored, STORE_RETRY_NODES)):
            num_refusals = self._unstored.pop(node)
            if node.parent is None or num_refusals > STORE_RETRIES:
                continue
            if self._write_back(self.full, node):
                self._unstored[node] = num_refusals

    def _storage_writable(self) -> bool:
        return self.tiers.controller.storage_writable(self.full.kind)

    def flush(self, deadline_s: float) -> bool:
        """Bring everything into storage, waiting for it; True if that was done in time.

        Works in waves, parents first: what the host has is written, what the host lacks is backed up as far as there
        is room, and what was written makes room for the next wave. Tries also a storage that failed a moment ago; ends
        early when a wave gets nowhere. Nothing that ended is left unsettled.
        """
        if not self.has_storage:
            return True
        deadline = self.tiers.controller.now_s() + deadline_s
        num_missing, num_backups = -1, 0
        while self._wait_until_down(deadline):
            missing = [node for node in self.tree.nodes() if not self._is_stored(node)]
            if not missing:
                return True
            if len(missing) == num_missing and not num_backups:
                return False
            num_missing = len(missing)
            # Written first: pages on their way to storage are not dropped to make room for the others.
            for node in missing:
                self._write_back(self.full, node)
            num_backups = sum(self._back_up_if_missing(node) for node in missing)
        return False

    def _wait_until_down(self, deadline: float) -> bool:
        """Wait for the backups and stores under way, but not for reads; False at the deadline."""
        controller = self.tiers.controller
        while controller.num_moving_down:
            remaining_s = deadline - controller.now_s()
            if remaining_s <= 0:
                break
            controller.wait_any(remaining_s)
            self.settle()
        return not controller.num_moving_down

    def _is_stored(self, node: TreeNode) -> bool:
        data = node.data[self.full.index]
        if data.host_pages is None:
            return data.in_storage
        return bool(self.full.host.stored[data.host_pages].all())

    def _back_up_if_missing(self, node: TreeNode) -> bool:
        plan = self.full.write_through(node)
        return plan is not None and self._backup(plan)

    # -- storage -> host ---------------------------------------------------------------------------------------------

    def ask_storage(self, namespace: KeyNamespace, key: bytes) -> tuple[int, TransferId] | None:
        """Start looking up what the tree lacks of `key`: its first missing page, and the look-up. None if nothing."""
        path = self.path_of(namespace, key)
        request = PrefetchRequest(path, len(key) // self._codec.token_bytes)
        first_page = self.full.prefetch(request).storage_pages.start
        tokens = key[first_page * self._codec.page_bytes :]
        if not tokens:
            return None
        parent = self.full.page_keys(path[-1])[-1] if path else None
        hasher = self.full.hasher(namespace.extra_key)
        return first_page, self.tiers.controller.lookup(self.full.kind, hasher, parent, tokens)

    def attach_host(
        self,
        namespace: KeyNamespace,
        key: bytes,
        host_pages: Int32Array,
        page_keys: Sequence[PageKey],
    ) -> bool:
        """Put fetched pages, the last ones of `key`, into the tree. False if what lies above them is gone; pages the
        tree does not take are given back."""
        page_bytes = self._codec.page_bytes
        first = len(key) // page_bytes - len(host_pages)
        path = self.path_of(namespace, key)
        have = sum(node.num_tokens for node in path) // self._page_size
        if have < first:
            self.tiers.give_up(self.full, host_pages)
            return False
        known = have - first
        self.tiers.give_up(self.full, host_pages[:known])
        if known < len(host_pages):
            parent = path[-1] if path else self.tree.root
            node = self.tree.add_child(parent, namespace, key[have * page_bytes :])
            node.data[self.full.index].page_keys = list(page_keys[known:])
            self.tiers.adopt(self.full, node, host_pages[known:].copy())
            path.append(node)
        self.touch(path[-1])
        return True

    def host_share(self, share: float) -> int:
        """That share of the host pool, in pages."""
        return int(self.tiers.controller.host_pool(self.full.kind).num_pages * share)

    def alloc_host_below(self, namespace: KeyNamespace, key: bytes, num_pages: int) -> Int32Array:
        """Host pages for what is to follow `key`, as many as there can be room for, at most `num_pages`; int32[n].

        The prefix itself is marked as used and does not make room for its own continuation.
        """
        pool = self.tiers.controller.host_pool(self.full.kind)
        path = self.path_of(namespace, key)
        own = [p for node in path if (p := node.data[self.full.index].host_pages) is not None]
        pinned = np.concatenate(own) if own else NO_SLOTS
        if path:
            self.touch(path[-1])
        pool.lock(pinned)
        try:
            self._make_host_room(self.full, num_pages)
        finally:
            self.tiers.controller.release(self.full.kind, pinned)
        host_pages = pool.alloc(min(num_pages, pool.num_free))
        return host_pages if host_pages is not None else NO_SLOTS

    # -- host -> device ----------------------------------------------------------------------------------------------

    def load(self, path: list[TreeNode], device_len: int) -> tuple[Int32Array, PendingLoad] | None:
        """Bring the part of `path` behind `device_len` tokens to the device and wait for it. None if that failed.

        Everything the load reads or hangs on is pinned before room is made for it: making room can back up, and so
        evict host pages, and may not evict these.
        """
        num_tokens = sum(node.num_tokens for node in path)
        plan = self.full.prefetch(PrefetchRequest(path, num_tokens))
        pool = self.tiers.controller.host_pool(self.full.kind)
        last_node, loaded = path[-1], None
        pool.lock(plan.host_pages)
        self.full.lock(last_node)
        try:
            loaded = self._load_pinned(plan, num_tokens - device_len, last_node)
        finally:
            if loaded is None:
                pool.unlock(plan.host_pages)
                self.full.unlock(last_node)
        return loaded

    def _load_pinned(
        self, plan: PrefetchPlan, num_tokens: int, last_node: TreeNode
    ) -> tuple[Int32Array, PendingLoad] | None:
        dp_rank = last_node.namespace.dp_rank
        slots = self._alloc_device(num_tokens, dp_rank)
        if slots is None:
            return None
        future = self.tiers.load(plan, device_pages_of(slots, self._page_size), dp_rank)
        self.settle()
        if future is None:
            self.free_device(slots, dp_rank)
            return None
        self._attach_loaded(last_node, slots)
        return slots, PendingLoad(future, last_node, plan.host_pages, self.epoch)

    def _attach_loaded(self, last_node: TreeNode, device_slots: Int32Array) -> None:
        """Give loaded slots to the nodes they belong to, as the path is now (settling may have split it)."""
        start = 0
        for node in [n for n in last_node.path() if not self.on_device(n)]:
            self.attach_device(node, device_slots[start : start + node.num_tokens])
            start += node.num_tokens

    def finish_load(self, load: PendingLoad) -> None:
        """Scatter loaded pages into the buffers and release what the load held. After a reset nothing is scattered."""
        if load.epoch == self.epoch:
            self.tiers.controller.commit_load(self.full.kind, load.future)
            self.full.unlock(load.node)
        self.tiers.controller.release(self.full.kind, load.host_pages)

    def device_room(self, last_node: TreeNode, dp_rank: int) -> int:
        """Tokens that could be loaded below the device part of this path: free ones and what may be evicted for it."""
        own = sum(
            n.num_tokens
            for n in last_node.ancestors()
            if self.on_device(n) and not n.data[self.full.index].device_lock
        )
        free = self._allocator.available_size(dp_rank=dp_rank)
        return free + self.full.device.evictable(dp_rank) - own

    def _alloc_device(self, num_tokens: int, dp_rank: int) -> Int32Array | None:
        short = num_tokens - self._allocator.available_size(dp_rank=dp_rank)
        if short > 0:
            self.evict_device(short, dp_rank)
        return self._allocator.alloc(num_tokens, dp_rank=dp_rank)

    # -- what has ended ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Take note of ended transfers. Look-ups and fetches wait for `take_arrivals`."""
        if self._tiers is None or not self._tiers.controller.num_in_flight:
            return
        settlement = self._tiers.settle()
        for node, component in settlement.lost.items():
            if node.parent is not None and node.data[component.index].host_pages is not None:
                self.tiers.drop_host(component, node)
                if not self.on_device(node):
                    self.remove_subtree(node)
        self._reserve_may_lack = True
        if self._store_early and self.has_storage:
            for node in settlement.unstored:
                self._unstored[node] = self._unstored.get(node, 0) + 1
                self._retry_at_s = self.tiers.controller.now_s() + STORE_RETRY_S
            for node, component in settlement.backed_up.items():
                if not self._storage_writable():
                    self._unstored.setdefault(node, 0)
                elif node.parent is not None:
                    self._write_back(component, node)
        self._lookups += settlement.lookups
        self._fetches += settlement.fetches

    def take_arrivals(self) -> tuple[list[LookupResult], list[TransferResult]]:
        """The look-ups and fetches that ended since the last call, each once. Fetched pages have no owner yet."""
        arrivals = self._lookups, self._fetches
        self._lookups, self._fetches = [], []
        return arrivals

    def is_current(self, node: TreeNode) -> bool:
        """False for a node that a reset has forgotten."""
        while node.parent is not None:
            node = node.parent
        return node is self.tree.root

    def reset(self) -> None:
        """Forget every node. Host pages are given back (those in transfer when it ends); device slots are not touched,
        the engine clears its allocator itself."""
        self.epoch += 1
        self._unstored.clear()
        self.tree = RadixTree(self._codec, len(self.components))
        for component in self.components:
            component.device.clear()
            pages = np.array(component.host.clear(), np.int32)
            if len(pages):
                self.tiers.give_up(component, pages)

    def check_invariants(self) -> None:
        """The tree's, the components' and the tiers' own; raises InvariantError."""
        self.tree.check_invariants()
        for component in self.components:
            component.check_invariants(self.tree.nodes())
        if self._tiers is not None:
            self._tiers.controller.check_invariants()
