"""The prefix cache of the engine: one tree over device (L1), pinned host memory (L2) and storage (L3).

`UnifiedRadixCache` is the only entry. It speaks the engine's contract (match, insert, evict, locks, requests,
load-back, prefetch) and leaves the pages to `TieredTree`. Without lower tiers it is an ordinary prefix cache.

Everything runs on the scheduler thread. Device buffers are read and written only inside `insert`, `evict` and
`finish_load_back` (and, to make room, `init_load_back`), that is, between two forward steps or in data order with them;
`_donation_barrier`, if the engine sets it, is waited for before a gather. No call waits for a transfer but
`init_load_back`, for its own pages, and `flush_to_storage`. Only `open_storage` may be called from another thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .hicache.config import PrefetchRules
from .hicache.contract import (
    CacheableRequest,
    DonationBarrier,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
)
from .hicache.device_eviction import DeviceEviction
from .hicache.errors import StorageAttachError
from .hicache.insertion import Insertion
from .hicache.load_back import LoadBack, PendingLoad
from .hicache.metrics import HiCacheMetrics
from .hicache.request_states import RequestStates
from .hicache.statistics import CacheStatistics, statistics_of
from .hicache.storage_mount import DetachedStorage, StorageMount, StorageOpener
from .hicache.storage_prefetch import StoragePrefetch
from .hicache.storage_writer import StorageWriter
from .hicache.tiered_tree import NO_SLOTS, TieredTree
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

    `tree`: the components and tiers, wired by `builder`; `storage_opener` with a host tier. `sliding_window_size`:
    tokens, with a sliding-window component. `recurrent_track_interval`: tokens between two snapshots that the engine
    takes of a request's recurrent state, with a recurrent component. `checkpoint_interval`: tokens between the borders
    at which an engine should hand a decoding request's pages over (`cache_unfinished_req`), before its window leaves
    them behind; 0: never. `disable`: nothing is ever reused. `clock`: monotonic seconds.
    """

    def __init__(
        self,
        *,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool_allocator: TokenToKVPoolAllocator,
        tree: TieredTree,
        metrics: HiCacheMetrics,
        storage_opener: StorageOpener | None,
        prefetch_rules: PrefetchRules,
        sliding_window_size: int | None = None,
        recurrent_track_interval: int = 0,
        checkpoint_interval: int = 0,
        disable: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.page_size = tree.codec.page_size
        self.disable = disable
        self.metrics = metrics
        self.hicache_enabled = tree.has_tiers and not disable
        self.sliding_window_size = sliding_window_size
        self.recurrent_track_interval = recurrent_track_interval
        self.checkpoint_interval = 0 if disable else checkpoint_interval
        self._codec = tree.codec
        self._tree = tree
        self._storage_opener = storage_opener
        self._insertion = Insertion(tree)
        self._eviction = DeviceEviction(tree, metrics)
        self._load_back = LoadBack(tree, self._eviction)
        self._writer = StorageWriter(tree)
        self._states = RequestStates(tree, self._eviction)
        self._prefetch = StoragePrefetch(tree, metrics, rules=prefetch_rules, clock=clock)
        self._last_asker: Any = None

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
        """The longest prefix of `params.key` that can be reused. Marks it as just used; may split nodes.

        With a recurrent component and `cow_recurrent` the request is told which state to start from.
        """
        root, tree = self.root_node, self._tree
        self._last_asker = params.req if params.cow_recurrent else None
        if self.disable:
            return MatchResult(NO_SLOTS, root, root, root)
        path = tree.path_of(_namespace(params.key), self._codec.encode(params.key.token_ids))
        num_tokens = sum(node.num_tokens for node in path)
        if params.full_only:
            hit_len = device_len = tree.usable_full(path, num_tokens)
        else:
            hit_len = tree.usable(path, num_tokens, with_host=True)
            device_len = tree.usable(path, hit_len, with_host=False)
        path = tree.cut(path, hit_len)
        device_path = tree.cut(path, device_len)
        device_node = device_path[-1] if device_path else root
        host_node = path[-1] if path else root
        tree.touch(host_node)
        self._start_from(device_node)
        slots = tree.device_slots(device_path)
        return MatchResult(slots, device_node, host_node, host_node, hit_len - device_len)

    def _start_from(self, node: TreeNode) -> None:
        """Tell the request that asked last which recurrent state belongs to the prefix that ends at `node`."""
        slot = self._tree.state_slot(node)
        if slot is not None and self._last_asker is not None:
            self._last_asker.recurrent_cow_src_index = slot

    def insert(self, params: InsertParams) -> InsertResult:
        """Put the whole pages of `params.key` into the tree and start their backup.

        Node by node: what the tree has on the device stays, and the caller's slots for it are freed (but for the
        protected ones, which are the tree's own); what it has on lower tiers only, or not at all, takes the caller's.
        """
        prefix_len, last_node = self._insertion.insert(
            _namespace(params.key),
            self._codec.encode(params.key.token_ids),
            params.value,
            protected_len=params.protected_len,
            states=params.states,
            keep_tail=params.keep_tail,
        )
        return InsertResult(prefix_len, last_node)

    def cache_finished_req(self, req: CacheableRequest, is_insert: bool = True) -> None:
        """A request ends. Its tokens [0, kept) go into the tree, [kept, committed) are freed; its lock is released.

        With `is_insert` False, kept is what was the tree's already.
        """
        committed_len = req.pop_committed_kv_cache()
        dp_rank = req.dp_rank or 0
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, :committed_len].copy()
        if self.disable:
            self._tree.device.free_full(slots, dp_rank)
            return
        if not self._tree.is_current(req.last_node):
            return  # a reset came first: the engine has taken all slots back itself
        kept_len = req.cache_protected_len
        if is_insert:
            token_ids = [*req.origin_input_ids, *req.output_ids][:committed_len]
            kept_len = self._codec.aligned_len(len(token_ids))
            self._insert_request(req, token_ids, slots[:kept_len], keep_tail=True)
        self._tree.device.free_full(slots[kept_len:], dp_rank)
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
        whole_prompt = num_tokens >= len(req.origin_input_ids) + len(req.output_ids)
        last_node = self._insert_request(
            req, req.fill_ids, slots[:kept_len], keep_tail=whole_prompt
        ).last_node
        self.inc_lock_ref(last_node)
        self.dec_lock_ref(req.last_node)
        tree_slots = self._tree.device_slots(last_node.path())
        self.req_to_token_pool.write((req.req_pool_idx, slice(0, kept_len)), tree_slots)
        req.prefix_indices = np.concatenate([tree_slots, slots[kept_len:]])
        req.cache_protected_len = req.last_matched_prefix_len = kept_len
        req.last_node = last_node

    def _insert_request(
        self,
        req: CacheableRequest,
        token_ids: Sequence[int],
        device_slots: Int32Array,
        *,
        keep_tail: bool,
    ) -> InsertResult:
        key = RadixKey(token_ids, req.extra_key, req.dp_rank)
        states = self._states.hand_over(req, len(device_slots))
        return self.insert(
            InsertParams(key, device_slots, req.cache_protected_len, states, keep_tail)
        )

    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least that many Full tokens, SWA tokens and recurrent states of one rank, if as many are evictable.

        The end of the least recently used path goes first, and only as many of its pages as are needed; its SWA slots
        and state go with it.
        """
        rank = params.dp_rank
        return EvictResult(
            self._eviction.evict_full(params.num_tokens, rank),
            self._eviction.evict_swa(params.swa_num_tokens, rank),
            self._eviction.evict_states(params.recurrent_num, rank),
        )

    def evict_req_swa(self, req: Any, pre_len: int, dp_rank: int = 0) -> None:
        """Free the SWA slots of a running request's own tokens that neither the token at position `pre_len` nor a
        reader at the last page border before it needs: a later prompt may go on from there."""
        swa = self._tree.swa
        if swa is None or swa.reach is None:
            return
        first = max(req.cache_protected_len, req.swa_evicted_seqlen)
        end = (pre_len // self.page_size - swa.reach) * self.page_size
        if end > first:
            row = self.req_to_token_pool.req_to_token[req.req_pool_idx]
            self._tree.device.free_swa(row[first:end].copy(), dp_rank)
            req.swa_evicted_seqlen = end

    # -- locks and sizes ---------------------------------------------------------------------------------------------

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        """Keep on the device what a reader of the prefix that ends at `node` needs."""
        return IncLockRefResult(-self._tree.lock(node))

    def dec_lock_ref(self, node: TreeNode, params: DecLockRefParams | None = None) -> int:
        """Undo one `inc_lock_ref` of the same node; return the Full tokens that became evictable.

        Nothing happens for a node that a reset has forgotten.
        """
        return self._tree.unlock(node) if self._tree.is_current(node) else 0

    def evictable_size(self, dp_rank: int = 0) -> int:
        """Full tokens on the device that nobody keeps."""
        return self._tree.full.device.evictable(dp_rank)

    def protected_size(self, dp_rank: int = 0) -> int:
        """Full tokens on the device that somebody keeps."""
        return self._tree.full.device.protected(dp_rank)

    def full_evictable_size(self, dp_rank: int = 0) -> int:
        """`evictable_size`."""
        return self.evictable_size(dp_rank)

    def full_protected_size(self, dp_rank: int = 0) -> int:
        """`protected_size`."""
        return self.protected_size(dp_rank)

    def swa_evictable_size(self, dp_rank: int = 0) -> int:
        """SWA tokens on the device that nobody keeps."""
        return self._tree.swa.device.evictable(dp_rank) if self._tree.swa else 0

    def swa_protected_size(self, dp_rank: int = 0) -> int:
        """SWA tokens on the device that somebody keeps."""
        return self._tree.swa.device.protected(dp_rank) if self._tree.swa else 0

    def full_lru_list_evictable_size(self) -> int:
        """Full tokens that nobody keeps, over all ranks; the engine shows it when it is out of memory."""
        return self._tree.full.device.total_evictable()

    def swa_lru_list_evictable_size(self) -> int:
        """SWA tokens that nobody keeps, over all ranks; the engine shows it when it is out of memory."""
        return self._tree.swa.device.total_evictable() if self._tree.swa else 0

    def recurrent_evictable_size(self, dp_rank: int = 0) -> int:
        """Recurrent states on the device that nobody keeps."""
        return self._tree.recurrent.device.evictable(dp_rank) if self._tree.recurrent else 0

    def recurrent_protected_size(self, dp_rank: int = 0) -> int:
        """Recurrent states on the device that somebody keeps."""
        return self._tree.recurrent.device.protected(dp_rank) if self._tree.recurrent else 0

    def total_size(self) -> int:
        """Full tokens of the tree on the device, over all ranks."""
        return self._tree.full.device.total()

    def supports_swa(self) -> bool:
        """True if nodes carry sliding-window pages."""
        return self._tree.swa is not None

    def supports_recurrent(self) -> bool:
        """True if nodes carry recurrent states."""
        return self._tree.recurrent is not None

    def recurrent_extra_buffer_active(self) -> bool:
        """True if the engine is to take snapshots of recurrent states in track slots."""
        return self._tree.recurrent is not None and not self.disable

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
        device_len = self._tree.usable(path, sum(node.num_tokens for node in path), with_host=False)
        pending = self._load_back.load(path, device_len)
        if pending is None:
            return nothing
        self._start_from(pending.node)
        slots = self._tree.device_slots(pending.node.path())
        return slots[device_len:], pending.node, [pending]

    def finish_load_back(self, plans: Sequence[PendingLoad]) -> None:
        """Put loaded pages into the device buffers, before the forward step that reads them is started."""
        for pending in plans:
            self._load_back.finish(pending)

    # -- prefetch from storage ---------------------------------------------------------------------------------------

    def start_prefetch(self, rid: str, key: RadixKey) -> None:
        """A request has arrived: ask storage for what the other tiers lack of `key`. Once per request, never blocks."""
        if self.hicache_enabled and self._tree.has_storage:
            self._prefetch.start(rid, _namespace(key), self._codec.encode(key.token_ids))

    def prefetch_ready(self, rid: str) -> bool:
        """False while the request should stay in the queue for its pages; the wait is counted from the first call."""
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
            self._writer.keep_reserve()
            self._writer.retry_stores()

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
        return not self.hicache_enabled or self._writer.flush(deadline_s)

    # -- storage comes and goes --------------------------------------------------------------------------------------

    def open_storage(self, path: Path, max_bytes: int = 0) -> StorageMount:
        """Check a folder as at start, and open it for this cache's model; `max_bytes` bounds its folder there, 0 for no
        bound. Any thread; blocks. Raises HiCacheConfigError for a path that cannot be used, StorageAttachError without
        a host tier."""
        if self._storage_opener is None:
            raise StorageAttachError("HiCache is off: start with --hicache-storage none or file")
        return self._storage_opener.open(path, max_bytes)

    def attach_storage(self, mount: StorageMount) -> None:
        """Read and write there from now on: what the host has is written too, with the early policy at once. Raises
        StorageAttachError if a storage is attached."""
        self._require_tiers()
        self._tree.attach_storage(mount)
        self._writer.storage_attached()

    def detach_storage(self) -> DetachedStorage:
        """Begin no read or write any more, and forget what storage has. What is under way ends without effect on the
        tree; requests that waited for it go on with what has arrived. Raises StorageAttachError if none is attached."""
        self._require_tiers()
        self.check_hicache_events()  # what has ended until now was about this storage
        detached = self._tree.detach_storage()
        self._prefetch.storage_detached()
        self._writer.reset()
        return detached

    def _require_tiers(self) -> None:
        if not self.hicache_enabled:
            raise StorageAttachError("HiCache is off: start with --hicache-storage none or file")

    def statistics(self) -> CacheStatistics:
        """What is where at this moment, and which tier served how many prompt tokens so far."""
        return statistics_of(self._tree, self._prefetch)

    def reset(self) -> None:
        """Forget everything on device and host; storage keeps its pages. What is under way ends without effect."""
        self._tree.reset()
        self._writer.reset()
        self._prefetch.reset()
        self._last_asker = None

    def shutdown(self, deadline_s: float) -> bool:
        """Stop the workers; False if one did not end in time. What is in storage is complete at every moment."""
        return not self.hicache_enabled or self._tree.tiers.shutdown(deadline_s)

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
            parts = [
                f"{c.kind.value}:{'D' if c.data(node).device_slots is not None else '-'}"
                f"{'H' if c.data(node).host_pages is not None else '-'}{c.data(node).device_lock}"
                for c in self._tree.components
            ]
            print(f"{'  ' * depth}{node} {' '.join(parts)}")


def _namespace(key: RadixKey) -> KeyNamespace:
    return KeyNamespace(key.extra_key, key.dp_rank or 0)
