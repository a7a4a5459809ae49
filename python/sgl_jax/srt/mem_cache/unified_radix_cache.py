"""The prefix cache of the engine: one tree over device (L1), pinned host memory (L2) and storage (L3).

`UnifiedRadixCache` is the only entry. It speaks the engine's contract (match, insert, evict, locks, requests,
load-back, prefetch) and leaves the pages to `TieredTree`. Without lower tiers it is an ordinary prefix cache.

Everything runs on the scheduler thread. Device buffers are read and written only inside `insert`, `evict` and
`finish_load_back` (and, to make room, `init_load_back`), that is, between two forward steps or in data order with them;
`_donation_barrier`, if the engine sets it, is waited for before a gather. No call waits for a transfer but
`init_load_back`, for its own pages, and `flush_to_storage`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from .hicache.components.base import usable_prefix
from .hicache.components.full import FullComponent
from .hicache.contract import (
    CacheableRequest,
    DonationBarrier,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
)
from .hicache.lower_tiers import LowerTiers
from .hicache.metrics import HiCacheMetrics
from .hicache.storage_prefetch import StoragePrefetch
from .hicache.tiered_tree import NO_SLOTS, PendingLoad, TieredTree
from .hicache.token_key import TokenCodec
from .hicache.tree_node import KeyNamespace, TreeNode
from .hicache.tree_types import (
    DecLockRefParams,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    RadixKey,
)
from .hicache.types import TierTokens

Int32Array = npt.NDArray[np.int32]


class UnifiedRadixCache:
    """The engine's cache; see the module for the rules.

    `full`: the component that every node has. `lower_tiers`: None switches HiCache off. `store_early`: storage gets a
    page as soon as its host copy is complete (write_through), else when it is to leave the host. `disable`: nothing is
    ever reused. `clock`: monotonic seconds.
    """

    def __init__(
        self,
        *,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool_allocator: TokenToKVPoolAllocator,
        page_size: int,
        full: FullComponent,
        metrics: HiCacheMetrics,
        lower_tiers: LowerTiers | None = None,
        store_early: bool = True,
        prefetch_deadline_s: float = 5.0,
        is_eagle: bool = False,
        disable: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.page_size = page_size
        self.disable = disable
        self.metrics = metrics
        self.hicache_enabled = lower_tiers is not None and not disable
        self._codec = TokenCodec(page_size, is_eagle)
        self._tree = TieredTree(
            codec=self._codec,
            full=full,
            allocator=token_to_kv_pool_allocator,
            metrics=metrics,
            tiers=lower_tiers,
            store_early=store_early,
        )
        self._prefetch = StoragePrefetch(
            self._tree, self._codec, metrics, deadline_s=prefetch_deadline_s, clock=clock
        )

    @property
    def root_node(self) -> TreeNode:
        """The root; it holds no tokens."""
        return self._tree.tree.root

    @property
    def _donation_barrier(self) -> DonationBarrier | None:
        """Set by the engine when steps overlap; waited for before a gather."""
        return self._tree.donation_barrier

    @_donation_barrier.setter
    def _donation_barrier(self, barrier: DonationBarrier | None) -> None:
        self._tree.donation_barrier = barrier

    # -- looking up and inserting ------------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest prefix of `params.key` that can be reused. Marks it as just used; may split nodes."""
        root = self.root_node
        if self.disable:
            return MatchResult(NO_SLOTS, root, root, root)
        path = self._tree.path_of(_namespace(params.key), self._codec.encode(params.key.token_ids))
        num_tokens = sum(node.num_tokens for node in path)
        hit_len = usable_prefix(self._tree.components, path, num_tokens, with_host=True)
        device_len = usable_prefix(self._tree.components, path, hit_len, with_host=False)
        path = self._tree.cut(path, hit_len)
        device_path = self._tree.cut(path, device_len)
        device_node = device_path[-1] if device_path else root
        host_node = path[-1] if path else root
        self._tree.touch(host_node)
        slots = self._tree.device_slots(device_path)
        return MatchResult(slots, device_node, host_node, host_node, hit_len - device_len)

    def insert(self, params: InsertParams) -> InsertResult:
        """Put the whole pages of `params.key` into the tree and start their backup.

        Node by node: what the tree has on the device stays, and the caller's slots for it are freed (but for the
        protected ones, which are the tree's own); what it has on lower tiers only, or not at all, takes the caller's.
        """
        namespace = _namespace(params.key)
        key = self._codec.encode(params.key.token_ids)
        path = self._tree.path_of(namespace, key)
        start = prefix_len = 0
        for node in path:
            end = start + node.num_tokens
            slots = params.value[start:end]
            if self._tree.on_device(node):
                spare = slots[max(params.protected_len - start, 0) :]
                self._tree.free_device(spare, namespace.dp_rank)
                prefix_len = end
            else:
                self._tree.attach_device(node, slots)
            start = end
        if (rest := key[start * self._codec.token_bytes :]) != b"":
            parent = path[-1] if path else self.root_node
            slots = params.value[start : len(key) // self._codec.token_bytes]
            path += self._tree.add_device_leaves(parent, namespace, rest, slots)
        last_node = path[-1] if path else self.root_node
        self._tree.touch(last_node)
        self._tree.write_through(path)
        return InsertResult(prefix_len, last_node)

    def cache_finished_req(self, req: CacheableRequest, is_insert: bool = True) -> None:
        """A request ends. Its tokens [0, kept) go into the tree, [kept, committed) are freed; its lock is released.

        With `is_insert` False, kept is what was the tree's already.
        """
        committed_len = req.pop_committed_kv_cache()
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, :committed_len].copy()
        if self.disable:
            self._tree.free_device(slots, req.dp_rank or 0)
            return
        if not self._tree.is_current(req.last_node):
            return  # a reset came first: the engine has taken all slots back itself
        kept_len = req.cache_protected_len
        if is_insert:
            kept_len = self._codec.aligned_len(committed_len)
            token_ids = [*req.origin_input_ids, *req.output_ids][:committed_len]
            self._insert_request(req, token_ids, slots[:kept_len])
        self._tree.free_device(slots[kept_len:], req.dp_rank or 0)
        self.dec_lock_ref(req.last_node)

    def cache_unfinished_req(self, req: CacheableRequest) -> None:
        """A prefill chunk is done. Of the request's tokens, [0, kept) are the tree's from now on, and locked;
        [kept, num_tokens) stay the request's."""
        num_tokens = len(req.fill_ids)
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, :num_tokens].copy()
        if self.disable:
            req.prefix_indices = slots
            return
        kept_len = self._codec.aligned_len(num_tokens)
        last_node = self._insert_request(req, req.fill_ids, slots[:kept_len]).last_node
        self.inc_lock_ref(last_node)
        self.dec_lock_ref(req.last_node)
        tree_slots = self._tree.device_slots(last_node.path())
        self.req_to_token_pool.write((req.req_pool_idx, slice(0, kept_len)), tree_slots)
        req.prefix_indices = np.concatenate([tree_slots, slots[kept_len:]])
        req.cache_protected_len = req.last_matched_prefix_len = kept_len
        req.last_node = last_node

    def _insert_request(
        self, req: CacheableRequest, token_ids: Sequence[int], device_slots: Int32Array
    ) -> InsertResult:
        key = RadixKey(token_ids, req.extra_key, req.dp_rank)
        return self.insert(InsertParams(key, device_slots, req.cache_protected_len))

    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least `params.num_tokens` device tokens of one rank, if that many are evictable.

        The end of the least recently used path goes first, and only as many of its pages as are needed.
        """
        return EvictResult(self._tree.evict_device(params.num_tokens, params.dp_rank))

    # -- locks and sizes ---------------------------------------------------------------------------------------------

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        """Keep the prefix that ends at `node` on the device."""
        return IncLockRefResult(-sum(c.lock(node) for c in self._tree.components))

    def dec_lock_ref(self, node: TreeNode, params: DecLockRefParams | None = None) -> int:
        """Undo one `inc_lock_ref` of the same node; return the tokens that became evictable.

        Nothing happens for a node that a reset has forgotten.
        """
        if not self._tree.is_current(node):
            return 0
        return sum(c.unlock(node) for c in self._tree.components)

    def evictable_size(self, dp_rank: int = 0) -> int:
        """Device tokens of the tree that nobody keeps."""
        return self._tree.full.device.evictable(dp_rank)

    def protected_size(self, dp_rank: int = 0) -> int:
        """Device tokens of the tree that somebody keeps."""
        return self._tree.full.device.protected(dp_rank)

    def total_size(self) -> int:
        """Device tokens of the tree, over all ranks."""
        return self._tree.full.device.total()

    def supports_recurrent(self) -> bool:
        """True if nodes carry recurrent states."""
        return False

    def recurrent_extra_buffer_active(self) -> bool:
        """True if recurrent states are tracked in extra slots."""
        return False

    # -- load-back ---------------------------------------------------------------------------------------------------

    def init_load_back(
        self, last_host_node: TreeNode, host_hit_length: int, mem_quota: int | None = None
    ) -> tuple[Int32Array, TreeNode, list[PendingLoad]]:
        """Bring the host part of a matched prefix to the device, evicting others for it if need be; waits for the copy.

        Returns its device slots int32[n], the node that ends it, and what `finish_load_back` must get before the next
        forward step. n is less than `host_hit_length` if the room does not suffice, 0 if there is none or the copy
        failed: then the request recomputes. `mem_quota` (free tokens) leaves out what can be evicted and is not needed.
        """
        nothing: tuple[Int32Array, TreeNode, list[PendingLoad]] = (NO_SLOTS, last_host_node, [])
        if not self.hicache_enabled or host_hit_length <= 0:
            return nothing
        path = last_host_node.path()
        hit_len = sum(node.num_tokens for node in path)
        hit_len = usable_prefix(self._tree.components, path, hit_len, with_host=True)
        device_len = usable_prefix(self._tree.components, path, hit_len, with_host=False)
        room = self._tree.device_room(last_host_node, last_host_node.namespace.dp_rank)
        load_len = min(hit_len - device_len, room // self.page_size * self.page_size)
        if load_len <= 0:
            return nothing
        loaded = self._tree.load(self._tree.cut(path, device_len + load_len), device_len)
        if loaded is None:
            return nothing
        slots, pending = loaded
        return slots, pending.node, [pending]

    def finish_load_back(self, plans: Sequence[PendingLoad]) -> None:
        """Put loaded pages into the device buffers, before the forward step that reads them is started."""
        for pending in plans:
            self._tree.finish_load(pending)

    # -- prefetch from storage ---------------------------------------------------------------------------------------

    def start_prefetch(self, rid: str, key: RadixKey) -> None:
        """A request has arrived: ask storage for what the other tiers lack of `key`. Once per request, never blocks."""
        if self.hicache_enabled and self._tree.has_storage:
            self._prefetch.start(rid, _namespace(key), self._codec.encode(key.token_ids))

    def prefetch_ready(self, rid: str) -> bool:
        """False while the request should stay in the queue for its pages; the deadline runs from the first call."""
        return self._prefetch.ready(rid)

    def release_prefetch(self, rid: str) -> None:
        """The request ended, in whatever way: forget its prefetch. Idempotent."""
        self._prefetch.release(rid)

    def tier_tokens(
        self, rid: str, prompt_len: int, device_len: int, prefix_len: int
    ) -> TierTokens:
        """Count an admitted request's prompt, once: [0, device_len) matched on the device, [device_len, prefix_len)
        loaded back, the rest computed."""
        return self._prefetch.admitted(rid, prompt_len, device_len, prefix_len)

    # -- events, flush, end ------------------------------------------------------------------------------------------

    def check_hicache_events(self) -> None:
        """Take note of what has ended. Once per scheduling round, idle ones included; cheap if nothing is under way."""
        if self.hicache_enabled:
            self._tree.settle()
            self._prefetch.use_arrivals()
            self._tree.keep_reserve()
            self._tree.retry_stores()

    def flush_write_through_acks(self) -> None:
        """The same, from the engine's decode rounds."""
        self.check_hicache_events()

    def precompile_hicache_transfers(self) -> None:
        """Compile gathers and scatters before the first request."""
        if self.hicache_enabled:
            self._tree.tiers.controller.precompile()

    def has_pending_work(self) -> bool:
        """True while transfers are under way, so that an idle engine goes on calling `check_hicache_events`."""
        return self.hicache_enabled and self._tree.tiers.controller.num_in_flight > 0

    def wait_events(self, timeout_s: float) -> bool:
        """Block until `check_hicache_events` has something to do; False at the time limit."""
        return self.has_pending_work() and self._tree.tiers.controller.wait_any(timeout_s)

    def flush_to_storage(self, deadline_s: float) -> bool:
        """Bring everything into storage, waiting at most `deadline_s`; False if something is not there."""
        return not self.hicache_enabled or self._tree.flush(deadline_s)

    def reset(self) -> None:
        """Forget everything on device and host; storage keeps its pages. What is under way ends without effect."""
        self._tree.reset()
        self._prefetch.reset()

    def shutdown(self, deadline_s: float) -> bool:
        """Stop the workers; False if one did not end in time. What is in storage is complete at every moment."""
        return not self.hicache_enabled or self._tree.tiers.controller.shutdown(deadline_s)

    def sanity_check(self) -> None:
        """`check_invariants` under the engine's name."""
        self.check_invariants()

    def check_invariants(self) -> None:
        """Verify tree, components, host pools and transfers against each other; raises InvariantError."""
        self._tree.check_invariants()

    def pretty_print(self) -> None:
        """Print the tree, a node a line, for a person."""
        for node in self._tree.tree.nodes():
            depth = sum(1 for _ in node.ancestors()) - 1
            data = node.data[self._tree.full.index]
            device = "device" if data.device_slots is not None else "-"
            host = "host" if data.host_pages is not None else "-"
            print(f"{'  ' * depth}{node} {device} {host} lock={data.device_lock}")


def _namespace(key: RadixKey) -> KeyNamespace:
    return KeyNamespace(key.extra_key, key.dp_rank or 0)
