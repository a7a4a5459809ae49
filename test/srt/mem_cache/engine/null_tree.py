"""A prefix cache that remembers nothing, with the whole surface that the scheduler uses.

Every page belongs to its request and goes back to the allocator when the request ends. Tests override single methods.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sgl_jax.srt.mem_cache.hicache.tree_types import (
    DecLockRefParams,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    Int32Array,
    MatchPrefixParams,
    MatchResult,
    RadixKey,
)
from sgl_jax.srt.mem_cache.hicache.types import TierTokens
from sgl_jax_hicache.engine.req import Req
from sgl_jax_hicache.engine.req_to_token_pool import ReqToTokenPool
from sgl_jax_hicache.engine.swa_allocator import SWATokenToKVPoolAllocator, TokenAllocator


class NullTree:
    """No reuse, no tiers, nothing pending. Scheduler thread only.

    `sliding_window_size` and `recurrent_track_interval` in tokens, for models that have such layers.
    """

    hicache_enabled = False
    disable = True
    checkpoint_interval = 0

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool_allocator: TokenAllocator,
        page_size: int,
        sliding_window_size: int | None = None,
        recurrent_track_interval: int = 0,
        **_unused: Any,
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.page_size = page_size
        self.sliding_window_size = sliding_window_size
        self.recurrent_track_interval = recurrent_track_interval
        self.root_node: Any = object()

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Nothing matches."""
        root = self.root_node
        return MatchResult(np.empty(0, dtype=np.int32), root, root, root)

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        """Free the request's pages."""
        committed_len = req.pop_committed_kv_cache()
        slots = self.req_to_token_pool.read(req.req_pool_idx, committed_len)
        self.token_to_kv_pool_allocator.free(slots, req.dp_rank)

    def cache_unfinished_req(self, req: Req) -> None:
        """Let the next chunk continue where this one ends."""
        req.prefix_indices = self.req_to_token_pool.read(req.req_pool_idx, len(req.fill_ids))

    def evict(self, params: EvictParams) -> EvictResult:
        """Nothing to evict."""
        return EvictResult(num_tokens=0)

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        """Nothing to lock."""
        return IncLockRefResult(delta=0)

    def dec_lock_ref(self, node: Any, params: DecLockRefParams | None = None) -> None:
        """Nothing to unlock."""

    def evictable_size(self, dp_rank: int = 0) -> int:
        """No token is evictable."""
        return 0

    def protected_size(self, dp_rank: int = 0) -> int:
        """No token is the cache's."""
        return 0

    def total_size(self) -> int:
        """No token is the cache's."""
        return 0

    def supports_swa(self) -> bool:
        """True for models with sliding layers."""
        return self.sliding_window_size is not None

    def full_evictable_size(self, dp_rank: int = 0) -> int:
        """No token is evictable."""
        return 0

    def full_protected_size(self, dp_rank: int = 0) -> int:
        """No token is the cache's."""
        return 0

    def swa_evictable_size(self, dp_rank: int = 0) -> int:
        """No token is evictable."""
        return 0

    def swa_protected_size(self, dp_rank: int = 0) -> int:
        """No token is the cache's."""
        return 0

    def evict_req_swa(self, req: Req, pre_len: int, dp_rank: int = 0) -> None:
        """Free the request's own pages that lie wholly before the window of the token at `pre_len`."""
        assert isinstance(self.token_to_kv_pool_allocator, SWATokenToKVPoolAllocator)
        assert self.sliding_window_size is not None
        start = max(req.cache_protected_len, req.swa_evicted_seqlen)
        end = max(0, pre_len - self.sliding_window_size + 1) // self.page_size * self.page_size
        if end > start:
            row = self.req_to_token_pool.req_to_token[req.req_pool_idx]
            self.token_to_kv_pool_allocator.free_swa(row[start:end].copy(), dp_rank)
            req.swa_evicted_seqlen = end

    def supports_recurrent(self) -> bool:
        """True for models with recurrent layers."""
        return self.req_to_token_pool.request_owned_slots > 0

    def recurrent_extra_buffer_active(self) -> bool:
        """True if states are tracked."""
        return self.recurrent_track_interval > 0

    def recurrent_evictable_size(self, dp_rank: int = 0) -> int:
        """No state is the cache's."""
        return 0

    def recurrent_protected_size(self, dp_rank: int = 0) -> int:
        """No state is the cache's."""
        return 0

    def reset(self) -> None:
        """Nothing to forget."""

    def init_load_back(
        self, last_host_node: Any, host_hit_length: int, mem_quota: int | None = None
    ) -> tuple[Int32Array, Any, list[Any]]:
        """Nothing to load."""
        return np.empty(0, dtype=np.int32), last_host_node, []

    def finish_load_back(self, plans: list[Any]) -> None:
        """Nothing to load."""

    def check_hicache_events(self) -> None:
        """Nothing is in flight."""

    def flush_write_through_acks(self) -> None:
        """Nothing is in flight."""

    def precompile_hicache_transfers(self) -> None:
        """Nothing to compile."""

    def start_prefetch(self, rid: str, key: RadixKey) -> None:
        """Nothing to fetch from."""

    def prefetch_ready(self, rid: str) -> bool:
        """At once."""
        return True

    def release_prefetch(self, rid: str) -> None:
        """Nothing is held."""

    def tier_tokens(
        self, rid: str, prompt_len: int, device_len: int, prefix_len: int
    ) -> TierTokens:
        """Everything is computed."""
        return TierTokens(computed=prompt_len)

    def has_pending_work(self) -> bool:
        """Never."""
        return False

    def wait_events(self, timeout_s: float) -> None:
        """Nothing will come."""

    def flush_to_storage(self, deadline_s: float) -> bool:
        """Nothing to store."""
        return True

    def shutdown(self, deadline_s: float) -> bool:
        """Nothing to stop."""
        return True

    def check_invariants(self) -> None:
        """Nothing to check."""

    def pretty_print(self) -> None:
        """Nothing to show."""
