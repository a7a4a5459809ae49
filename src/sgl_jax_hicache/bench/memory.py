"""Resident host memory after many evictions and loads, against what the flags promised.

Prompts go round a device pool that holds a quarter of them; all fit the host pool. So every request evicts pages and
loads others back. Memory is counted from the moment the cache is built and compiled, with its pools empty.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from sgl_jax.srt.mem_cache.hicache.builder import ModelIdentity, build_unified_radix_cache
from sgl_jax.srt.mem_cache.hicache.config import (
    AsyncImpl,
    HiCacheConfig,
    HostScheme,
    StorageKind,
)
from sgl_jax.srt.mem_cache.hicache.tree_types import (
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
)
from sgl_jax_hicache.engine.allocator import PagedTokenToKVPoolAllocator

from .record import Record
from .tree import NoRequests

PAGE_SIZE = 16
PROMPT_PAGES = 8
_WAIT_S = 60.0


@dataclass(frozen=True)
class Sizes:
    """How much there is of what."""

    page_bytes: int
    device_pages: int
    host_pages: int
    num_cycles: int

    @property
    def num_prompts(self) -> int:
        """As many as the host pool holds."""
        return self.host_pages // PROMPT_PAGES


class FewPages:
    """A device pool of one buffer, of float32."""

    page_size = PAGE_SIZE

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        shape = (num_pages + 1, page_bytes // 4)
        self.kv_buffer = [jnp.zeros(shape, jnp.float32, device=jax.devices()[0])]


class Traffic:
    """One cache and prompts that go round it."""

    def __init__(self, sizes: Sizes, config: HiCacheConfig) -> None:
        pool = FewPages(sizes.device_pages, sizes.page_bytes)
        size = sizes.device_pages * PAGE_SIZE
        self._allocator = PagedTokenToKVPoolAllocator(size, PAGE_SIZE, pool)
        self._cache = build_unified_radix_cache(
            config,
            req_to_token_pool=NoRequests(),
            token_to_kv_pool_allocator=self._allocator,
            page_size=PAGE_SIZE,
            model_identity=ModelIdentity("bench", "0"),
        )
        self._cache.precompile_hicache_transfers()
        self._keys = [
            RadixKey(np.arange(PAGE_SIZE * PROMPT_PAGES) + (i << 20))
            for i in range(sizes.num_prompts)
        ]
        self.num_loaded = 0

    def serve(self, number: int) -> None:
        """Match, load back, compute what is missing, insert, and wait for what that set going."""
        cache, key = self._cache, self._keys[number % len(self._keys)]
        match = cache.match_prefix(MatchPrefixParams(key))
        cache.inc_lock_ref(match.last_device_node)
        loaded, _, plans = cache.init_load_back(match.last_host_node, match.host_hit_length)
        cache.finish_load_back(plans)
        self.num_loaded += len(loaded)
        prefix = np.concatenate([match.device_indices, loaded])
        need = len(key) - len(prefix)
        cache.evict(EvictParams(max(need - self._allocator.available_size(), 0)))
        fresh = self._allocator.alloc(need)
        if fresh is None:
            raise RuntimeError("the device pool is too small for a prompt")
        cache.insert(InsertParams(key, np.concatenate([prefix, fresh]), len(prefix)))
        cache.dec_lock_ref(match.last_device_node)
        while cache.has_pending_work():
            if not cache.wait_events(_WAIT_S):
                raise RuntimeError("a transfer did not end")
            cache.check_hicache_events()

    def close(self) -> None:
        """Check the books and stop the workers."""
        self._cache.check_invariants()
        self._cache.shutdown(_WAIT_S)


def measure(sizes: Sizes, scheme: HostScheme, executor: AsyncImpl) -> Record:
    """Memory after a first round and at the end; the samples are spread over the cycles."""
    config = HiCacheConfig(
        storage=StorageKind.NONE,
        ratio=sizes.host_pages / sizes.device_pages,
        host_scheme=scheme,
        async_impl=executor,
    )
    traffic = Traffic(sizes, config)
    promised = sizes.host_pages * sizes.page_bytes / 1e6
    # A slab is there from the start; per_block has handed everything back after compiling.
    before = _resident_mb() - (promised if scheme is HostScheme.SLAB else 0.0)
    samples = []
    for cycle in range(sizes.num_cycles):
        traffic.serve(cycle)
        if (cycle + 1) % max(sizes.num_cycles // 20, sizes.num_prompts) == 0:
            samples.append(_resident_mb() - before)
    traffic.close()
    final = _resident_mb() - before
    return Record(
        "host memory held",
        final,
        "MB",
        promised,
        tuple(samples),
        {
            "cycles": sizes.num_cycles,
            "loaded_pages": traffic.num_loaded // PAGE_SIZE,
            "scheme": scheme.value,
            "executor": executor.value,
            "growth_mb": final - (samples[0] if samples else final),
        },
    )


def _resident_mb() -> float:
    """Resident memory, without what the C library keeps of freed memory where it can be asked to let go."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return float(psutil.Process().memory_info().rss) / 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--cycles", type=int, default=10_000)
    parser.add_argument("--page-bytes", type=int, default=512 << 10)
    parser.add_argument("--host-pages", type=int, default=512)
    parser.add_argument(
        "--schemes", nargs="+", choices=[s.value for s in HostScheme], default=["per_block"]
    )


def run(args: argparse.Namespace) -> list[Record]:
    """Every scheme asked for. Raises ArgumentTypeError for sizes that do not go together."""
    if args.page_bytes % 4 or args.host_pages < 4 * PROMPT_PAGES or args.cycles < 1:
        raise argparse.ArgumentTypeError(
            f"--page-bytes must be a multiple of 4, --host-pages at least {4 * PROMPT_PAGES}"
        )
    sizes = Sizes(args.page_bytes, args.host_pages // 4, args.host_pages, args.cycles)
    return [measure(sizes, HostScheme(name), AsyncImpl.THREADPOOL) for name in args.schemes]
