"""Everything that the engine's scheduler asks of a prefix cache is there, and takes what the engine gives it."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from sgl_jax.srt.mem_cache.hicache.builder import ModelIdentity, build_unified_radix_cache
from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig
from sgl_jax.srt.mem_cache.hicache.tree_types import EvictParams, MatchPrefixParams, RadixKey
from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sgl_jax_hicache import overlay

ATTRIBUTES = (
    "req_to_token_pool",
    "token_to_kv_pool_allocator",
    "page_size",
    "disable",
    "root_node",
    "sliding_window_size",
    "recurrent_track_interval",
    "hicache_enabled",
    "_donation_barrier",
)

ANY: Any = object()
RANK = {"dp_rank": 0}

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "match_prefix": ((ANY,), {}),
    "cache_unfinished_req": ((ANY,), {}),
    "cache_finished_req": ((ANY,), {"is_insert": False}),
    "evict": ((ANY,), {}),
    "inc_lock_ref": ((ANY,), {}),
    "dec_lock_ref": ((ANY, ANY), {}),
    "evictable_size": ((), RANK),
    "protected_size": ((), RANK),
    "full_evictable_size": ((), RANK),
    "full_protected_size": ((), RANK),
    "swa_evictable_size": ((), RANK),
    "swa_protected_size": ((), RANK),
    "full_lru_list_evictable_size": ((), {}),
    "swa_lru_list_evictable_size": ((), {}),
    "recurrent_evictable_size": ((0,), {}),
    "evict_req_swa": ((ANY, 128), RANK),
    "sanity_check": ((), {}),
    "supports_recurrent": ((), {}),
    "recurrent_extra_buffer_active": ((), {}),
    "total_size": ((), {}),
    "reset": ((), {}),
    "pretty_print": ((), {}),
    "check_hicache_events": ((), {}),
    "flush_write_through_acks": ((), {}),
    "init_load_back": ((ANY, 16), {"mem_quota": 64}),
    "finish_load_back": (([],), {}),
    "precompile_hicache_transfers": ((), {}),
}
"""The exact form of every call that the engine makes."""

OURS = {
    "start_prefetch": (("rid", ANY), {}),
    "prefetch_ready": (("rid",), {}),
    "release_prefetch": (("rid",), {}),
    "tier_tokens": (("rid", 3, 1, 2), {}),
    "flush_to_storage": ((1.0,), {}),
    "shutdown": ((1.0,), {}),
}
"""What the adapter calls beyond that."""


@pytest.fixture
def cache() -> UnifiedRadixCache:
    pool = SimpleNamespace(kv_buffer=[jnp.zeros((3, 4))], page_size=4)
    allocator = SimpleNamespace(
        page_size=4, get_kvcache=lambda: pool, available_size=lambda dp_rank=0: 8
    )
    rows = SimpleNamespace(req_to_token=np.zeros((2, 16), np.int32))
    return build_unified_radix_cache(
        HiCacheConfig(),
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        page_size=4,
        model_identity=ModelIdentity("model", "1"),
        dp_size=2,
    )


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attribute(cache: UnifiedRadixCache, name: str) -> None:
    assert hasattr(cache, name)


def test_the_donation_barrier_can_be_set(cache: UnifiedRadixCache) -> None:
    def barrier() -> None: ...

    cache._donation_barrier = barrier
    assert cache._donation_barrier is barrier


@pytest.mark.parametrize("name", [*CALLS, *OURS])
def test_method(name: str) -> None:
    args, kwargs = {**CALLS, **OURS}[name]
    inspect.signature(getattr(UnifiedRadixCache, name)).bind(ANY, *args, **kwargs)


def test_it_is_always_true(cache: UnifiedRadixCache) -> None:
    """The engine asks `if self.tree_cache`: an empty cache must not be taken for none."""
    assert not hasattr(UnifiedRadixCache, "__len__")
    assert not hasattr(UnifiedRadixCache, "__bool__")
    assert cache


def test_results_have_what_the_engine_reads(cache: UnifiedRadixCache) -> None:
    key = RadixKey([1, 2, 3, 4, 5], None, 1)
    match = cache.match_prefix(MatchPrefixParams(key=key, req=SimpleNamespace()))
    assert match.device_indices.dtype == np.int32
    assert match.host_hit_length == 0
    assert match.last_host_node is match.last_device_node is cache.root_node
    assert {cache.root_node: 1}[match.last_device_node] == 1, (
        "the policy counts nodes in a dictionary"
    )
    assert list(cache.root_node.children.values()) == []
    lock = cache.inc_lock_ref(match.last_device_node)
    assert lock.swa_uuid_for_lock is None
    cache.dec_lock_ref(match.last_device_node, lock.to_dec_params())
    cache.evict(EvictParams(num_tokens=4, swa_num_tokens=0, dp_rank=1, recurrent_num=0))
    assert isinstance(cache.total_size(), int)
    assert cache.evictable_size(dp_rank=1) == cache.protected_size(dp_rank=1) == 0


def test_the_list_is_complete() -> None:
    """What the sources of an installed engine ask of `tree_cache` is in the lists above."""
    spec = importlib.util.find_spec("sgl_jax")
    if not overlay.engine_installed() or spec is None or spec.origin is None:
        pytest.skip("the sgl-jax engine is not installed here")
    root = Path(spec.origin).parent / "srt"
    sources = [*(root / "managers").glob("*.py"), root / "mem_cache" / "common.py"]
    asked = {
        name
        for source in sources
        for name in re.findall(r"\btree_cache\.(\w+)", source.read_text(encoding="utf-8"))
    }
    assert asked
    assert asked <= {*ATTRIBUTES, *CALLS}
