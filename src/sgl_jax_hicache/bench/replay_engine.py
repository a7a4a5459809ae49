"""The engine side of a replay: one prompt at a time through the real cache, with KV pages of one number each.

A page of 512 tokens holds one float32 that is computed from its block's id. Every page that the cache says is there is
read back from the device buffer and compared, so a hit is only a hit if the content is right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.hicache.async_impl import TransferExecutor
from sgl_jax.srt.mem_cache.hicache.builder import ModelIdentity, build_unified_radix_cache
from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig
from sgl_jax.srt.mem_cache.hicache.storage.registry import STORAGE_FACTORIES, StorageFactory
from sgl_jax.srt.mem_cache.hicache.tree_types import (
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
)
from sgl_jax.srt.mem_cache.hicache.types import TierTokens
from sgl_jax_hicache.engine.allocator import PagedTokenToKVPoolAllocator

from .trace import BLOCK_TOKENS, TraceRequest

Int32Array = npt.NDArray[np.int32]

_WAIT_S = 60.0


class ReplayError(Exception):
    """The replay cannot go on: a request does not fit, a transfer hangs, or a hit has the wrong content."""


class BlockPool:
    """A device pool of one float32 per page."""

    page_size = BLOCK_TOKENS

    def __init__(self, num_pages: int) -> None:
        device = jax.devices()[0]
        self.kv_buffer = [jnp.zeros((num_pages + 1, 1, 1), jnp.float32, device=device)]

    def write(self, pages: Int32Array, values: npt.NDArray[np.float32]) -> None:
        """Put values into pages, in place, as a forward step does."""
        padded = _padded(pages)
        numbers = np.zeros(len(padded), np.float32)
        numbers[: len(pages)] = values
        self.kv_buffer[0] = _write(self.kv_buffer[0], padded, numbers)

    def read(self, pages: Int32Array) -> npt.NDArray[np.float32]:
        """The values of pages."""
        return np.asarray(_read(self.kv_buffer[0], _padded(pages)))[: len(pages)]


class NoRequests:
    """A request table without rows: prompts are inserted directly."""

    req_to_token = np.empty((0, 0), np.int32)

    def write(self, indices: object, values: Int32Array) -> None:
        """Never called."""
        raise ReplayError("the replay has no request table")


@dataclass(frozen=True)
class Served:
    """One request: which tier had its tokens, and the engine thread's seconds by phase.

    `cpu_s` is what of them it computed; in the rest it waited, for a copy or for a core.
    """

    num_blocks: int
    tiers: TierTokens
    phases: Mapping[str, float]
    cpu_s: float
    waited_s: float

    @property
    def engine_s(self) -> float:
        """Engine-thread seconds in the cache and the allocator, without waiting for storage."""
        return sum(self.phases.values())


@dataclass
class _Stopwatch:
    phases: dict[str, float] = field(default_factory=dict)
    cpu_s: float = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begun_s, cpu_begun_s = time.perf_counter(), time.thread_time()
        yield
        self.cpu_s += time.thread_time() - cpu_begun_s
        self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - begun_s


class ReplayEngine:
    """A cache of `l1_blocks` device pages, with the lower tiers of `config`."""

    def __init__(
        self,
        l1_blocks: int,
        config: HiCacheConfig,
        storage_factories: Mapping[str, StorageFactory] = STORAGE_FACTORIES,
        token_lists: bool = False,
        precompile: bool = True,
        executor: TransferExecutor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._token_lists = token_lists
        self._pool = BlockPool(l1_blocks)
        self._allocator = PagedTokenToKVPoolAllocator(
            l1_blocks * BLOCK_TOKENS, BLOCK_TOKENS, self._pool
        )
        self.cache = build_unified_radix_cache(
            config,
            req_to_token_pool=NoRequests(),
            token_to_kv_pool_allocator=self._allocator,
            page_size=BLOCK_TOKENS,
            model_identity=ModelIdentity("replay", "0"),
            storage_factories=storage_factories,
            executor=executor,
            clock=clock,
        )
        if precompile:
            self.cache.precompile_hicache_transfers()
        self._num_served = 0

    def serve(self, request: TraceRequest) -> Served:
        """One prompt, from arrival to the end, and then everything that it set going. Raises ReplayError."""
        watch = _Stopwatch()
        rid = str(self._num_served)
        self._num_served += 1
        key = self.key_of(request)
        with watch.phase("prefetch"):
            self.cache.start_prefetch(rid, key)
        waited_s = self._wait_for_prefetch(rid, watch)
        tiers = self._serve_admitted(rid, request, key, watch)
        waited_s += self._settle(watch)
        return Served(len(request.hash_ids), tiers, watch.phases, watch.cpu_s, waited_s)

    def key_of(self, request: TraceRequest) -> RadixKey:
        """The request's prompt."""
        return RadixKey(self._tokens(request))

    def compute(self, rid: str, request: TraceRequest, key: RadixKey) -> TierTokens:
        """One prompt whose prefetch `rid` was started and is waited for no longer. Raises ReplayError."""
        return self._serve_admitted(rid, request, key, _Stopwatch())

    def _serve_admitted(
        self, rid: str, request: TraceRequest, key: RadixKey, watch: _Stopwatch
    ) -> TierTokens:
        prefix, device_len = self._admit(key, watch)
        tiers = self.cache.tier_tokens(rid, len(key), device_len, len(prefix[0]))
        self.cache.release_prefetch(rid)
        self._finish(request, key, prefix, watch)
        return tiers

    def close(self) -> None:
        """Stop the cache's workers. Raises ReplayError if they hang."""
        if not self.cache.shutdown(_WAIT_S):
            raise ReplayError("the cache did not stop")

    def _tokens(self, request: TraceRequest) -> npt.NDArray[np.int64] | list[int]:
        tokens = np.repeat(np.array(request.hash_ids, np.int64), BLOCK_TOKENS)
        return tokens.tolist() if self._token_lists else tokens

    def _wait_for_prefetch(self, rid: str, watch: _Stopwatch) -> float:
        waited_s = 0.0
        while not self.cache.prefetch_ready(rid):
            waited_s += self._wait()
            with watch.phase("settle"):
                self.cache.check_hicache_events()
        return waited_s

    def _settle(self, watch: _Stopwatch) -> float:
        """Until nothing is under way: the trace has seconds between its requests, and the figures must repeat."""
        waited_s = 0.0
        while self.cache.has_pending_work():
            waited_s += self._wait()
            with watch.phase("settle"):
                self.cache.check_hicache_events()
        return waited_s

    def _wait(self) -> float:
        begun_s = time.perf_counter()
        if not self.cache.wait_events(_WAIT_S):
            raise ReplayError(f"no transfer ended in {_WAIT_S} s")
        return time.perf_counter() - begun_s

    def _admit(self, key: RadixKey, watch: _Stopwatch) -> tuple[tuple[Int32Array, object], int]:
        """Match and load. The prefix's slots and its node, which is locked, and how many were on the device."""
        cache = self.cache
        with watch.phase("match"):
            match = cache.match_prefix(MatchPrefixParams(key))
            cache.inc_lock_ref(match.last_device_node)
        slots, node = match.device_indices, match.last_device_node
        if match.host_hit_length:
            with watch.phase("load"):
                loaded, loaded_node, plans = cache.init_load_back(
                    match.last_host_node, match.host_hit_length
                )
                if len(loaded):
                    cache.finish_load_back(plans)
                    cache.inc_lock_ref(loaded_node)
                    cache.dec_lock_ref(node)
                    slots, node = np.concatenate([slots, loaded]), loaded_node
        return (slots, node), len(match.device_indices)

    def _finish(
        self,
        request: TraceRequest,
        key: RadixKey,
        prefix: tuple[Int32Array, object],
        watch: _Stopwatch,
    ) -> None:
        slots, node = prefix
        values = _values(request)
        num_known = len(slots) // BLOCK_TOKENS
        self._verify(slots, values[:num_known])
        with watch.phase("alloc"):
            need = len(key) - len(slots)
            short = need - self._allocator.available_size()
            if short > 0:
                self.cache.evict(EvictParams(short))
            fresh = self._allocator.alloc(need)
        if fresh is None:
            raise ReplayError(f"a request of {len(values)} blocks does not fit the device pool")
        self._pool.write(_pages(fresh), values[num_known:])
        with watch.phase("insert"):
            self.cache.insert(InsertParams(key, np.concatenate([slots, fresh]), len(slots)))
            self.cache.dec_lock_ref(node)  # type: ignore[arg-type]

    def _verify(self, slots: Int32Array, expected: npt.NDArray[np.float32]) -> None:
        if len(slots) and not np.array_equal(self._pool.read(_pages(slots)), expected):
            raise ReplayError("a page that the cache matched has another block's content")


def _values(request: TraceRequest) -> npt.NDArray[np.float32]:
    """What each block's page holds: whole numbers below 2**24, which float32 tells apart."""
    return (np.array(request.hash_ids, np.int64) * 40503 % (1 << 24)).astype(np.float32) + 1


def _pages(slots: Int32Array) -> Int32Array:
    return slots[::BLOCK_TOKENS] // np.int32(BLOCK_TOKENS)


def _padded(pages: Int32Array) -> Int32Array:
    """Up to a power of two with the sentinel page, so that few programs are compiled."""
    padded = np.zeros(1 << max(len(pages) - 1, 0).bit_length(), np.int32)
    padded[: len(pages)] = pages
    return padded


@jax.jit
def _read(buffer: jax.Array, pages: jax.Array) -> jax.Array:
    return buffer[pages, 0, 0]


def _write_pages(buffer: jax.Array, pages: jax.Array, values: jax.Array) -> jax.Array:
    return buffer.at[pages, 0, 0].set(values)


_write = jax.jit(_write_pages, donate_argnums=(0,))
