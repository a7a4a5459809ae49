"""A scheduler over a fake runner, driven step by step, with every invariant checked after each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine_fakes import HybridFakeRunner, PooledHybridFakeRunner, expected_output
from prometheus_client import CollectorRegistry

from sgl_jax.srt.mem_cache.hicache.builder import ModelIdentity, build_unified_radix_cache
from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig
from sgl_jax.srt.mem_cache.hicache.types import TierTokens
from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sgl_jax_hicache.engine.allocator import PagedTokenToKVPoolAllocator
from sgl_jax_hicache.engine.device_pools import build_allocator
from sgl_jax_hicache.engine.engine_metrics import EngineMetrics
from sgl_jax_hicache.engine.forward_batch import SamplingParams
from sgl_jax_hicache.engine.memory_pool import MHATokenToKVPool, RecurrentStatePool
from sgl_jax_hicache.engine.outputs import OutputChunk
from sgl_jax_hicache.engine.req import GenerateRequest
from sgl_jax_hicache.engine.req_to_token_pool import HybridReqToTokenPool, ReqToTokenPool
from sgl_jax_hicache.engine.scheduler import Scheduler, SchedulerConfig
from sgl_jax_hicache.engine.swa_kv_pool import SWAKVPool

TreeFactory = Callable[..., Any]
MAX_CONTEXT_LEN = 512


@dataclass
class Client:
    """Collects what one request yields."""

    chunks: list[OutputChunk] = field(default_factory=list)

    def __call__(self, chunk: OutputChunk) -> None:
        self.chunks.append(chunk)

    @property
    def tokens(self) -> list[int]:
        """All tokens so far."""
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def last(self) -> OutputChunk:
        """The final chunk."""
        assert self.chunks[-1].finish is not None
        return self.chunks[-1]


def radix_tree(
    rows: ReqToTokenPool,
    allocator: PagedTokenToKVPoolAllocator,
    page_size: int,
    config: HiCacheConfig | None = None,
    registry: CollectorRegistry | None = None,
    **hybrid: Any,
) -> UnifiedRadixCache:
    """The real prefix cache; HiCache is off by default."""
    return build_unified_radix_cache(
        config or HiCacheConfig(),
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        page_size=page_size,
        model_identity=ModelIdentity("fake", "0"),
        registry=registry,
        **hybrid,
    )


class SchedulerWorld:
    """All the parts of a scheduler around device pools of `num_pages` pages, for a fake model of any kind.

    `window`, `swa_pages`: tokens and pool of its sliding layers; 0: it has none. `states`: slots of the pool of its
    recurrent layers beyond those of `rows` requests; None: it has none. `interval`: tokens between checkpoints; 0: no
    states are tracked, and windows are kept where the cache chooses. `tree`: the class of a fake, or a function that
    builds the real cache, such as `radix_tree`, with `hicache` over its lower tiers; the runner then works on the pools
    that the cache copies. `hooks` are the runner's.
    """

    runner: HybridFakeRunner

    def __init__(
        self,
        *,
        num_pages: int = 32,
        page_size: int = 4,
        window: int = 0,
        swa_pages: int = 0,
        states: int | None = None,
        interval: int = 0,
        rows: int = 4,
        chunk: int = 16,
        overlap: bool = True,
        reserve: float = 0.5,
        tree: TreeFactory = radix_tree,
        hicache: HiCacheConfig | None = None,
        **hooks: Any,
    ) -> None:
        size, size_swa = num_pages * page_size, swa_pages * page_size
        is_hybrid = window > 0 or states is not None
        is_fake = isinstance(tree, type)
        is_pooled = not is_fake and (is_hybrid or hicache is not None)
        full, swa = (
            MHATokenToKVPool(max(tokens, page_size), page_size, "float32", 1, 2, int(is_pooled))
            for tokens in (size, size_swa)
        )
        pool = SWAKVPool(full, swa, (0,), (1,)) if window else full
        self.allocator: Any = build_allocator(pool)
        self.rows = ReqToTokenPool(rows, MAX_CONTEXT_LEN)
        state_pool = None
        if states is not None:
            track = (2 if overlap else 1) if interval else 0
            slots = rows * (1 + track) + states
            self.rows = HybridReqToTokenPool(rows, MAX_CONTEXT_LEN, slots, track)
            state_pool = RecurrentStatePool(slots, PooledHybridFakeRunner.STATE_DIMS, 1)
        if is_pooled:
            self.runner = PooledHybridFakeRunner(pool, state_pool, window=window, **hooks)
        else:
            self.runner = HybridFakeRunner(
                size + page_size,
                page_size,
                num_swa_slots=size_swa + page_size,
                window=window,
                num_states=self.rows.slots_per_rank,
                **hooks,
            )
        settings: dict[str, Any] = {"sliding_window_size": window or None}
        if is_fake:
            settings["recurrent_track_interval"] = interval
        else:
            config = hicache or HiCacheConfig()
            if interval:
                config = replace(config, checkpoint_interval=interval)
            settings |= {"config": config, "recurrent_state_pool": state_pool}
        self.tree = tree(self.rows, self.allocator, page_size, **settings)
        self.metrics = EngineMetrics()
        self.scheduler = Scheduler(
            SchedulerConfig(chunk, overlap, reserve, raise_on_idle_check=True),
            self.runner,
            self.tree,
            self.rows,
            self.allocator,
            self.metrics,
        )
        self.clients: dict[str, Client] = {}

    def submit(
        self, rid: str, prompt: Sequence[int], max_new_tokens: int = 8, **fields: Any
    ) -> Client:
        """Queue a greedy request."""
        sampling = fields.pop("sampling", SamplingParams(max_new_tokens=max_new_tokens))
        client = self.clients[rid] = Client()
        self.scheduler.submit(
            GenerateRequest(rid, tuple(prompt), sampling, client, arrival_s=0.0, **fields)
        )
        return client

    def run(self, max_steps: int = 2000) -> None:
        """Step until everything has ended, then check that nothing is held."""
        for _ in range(max_steps):
            self.scheduler.step()
            self.allocator.check_invariants()
            if not self.scheduler.busy():
                self.scheduler.check_idle()
                return
            if self.tree.has_pending_work():
                self.tree.wait_events(0.0)
        raise AssertionError(f"{self.scheduler.num_requests} requests never ended")

    def step(self, times: int = 1) -> None:
        """Some iterations."""
        for _ in range(times):
            self.scheduler.step()

    def settle(self) -> None:
        """Wait until no transfer is under way, and check the tree."""
        for _ in range(1000):
            self.tree.check_hicache_events()
            if not self.tree.has_pending_work():
                self.tree.check_invariants()
                return
            self.tree.wait_events(10)
        raise AssertionError("transfers never ended")

    def serve(self, rid: str, prompt: Sequence[int], max_new_tokens: int = 2) -> TierTokens:
        """Serve one request alone, check its answer, and wait for what it set off; which tiers served its prompt."""
        client = self.submit(rid, prompt, max_new_tokens)
        for _ in range(1000):
            if not self.scheduler.step() and self.tree.has_pending_work():
                self.tree.wait_events(10)
            if not self.scheduler.busy():
                break
        self.settle()
        self.scheduler.check_idle()
        assert client.tokens == expected_output(prompt, max_new_tokens)
        tiers = client.last.stats.tiers
        assert tiers.cached + tiers.computed == len(prompt)
        return tiers

    def held_tokens(self) -> int:
        """Full slots that are neither free nor the cache's."""
        state = self.scheduler.state()
        cached = self.tree.evictable_size() + self.tree.protected_size()
        return int(state["pool_tokens"]) - int(state["free_tokens"]) - cached
