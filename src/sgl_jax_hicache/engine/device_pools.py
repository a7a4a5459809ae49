"""The device pools of one model and the tables over them, built together because they must agree."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from .allocator import PagedTokenToKVPoolAllocator
from .memory_pool import RecurrentStatePool, build_recurrent_pool
from .model_config import ModelConfig
from .pool_sizes import PoolSizes
from .req_to_token_pool import HybridReqToTokenPool, ReqToTokenPool
from .swa_allocator import SWATokenToKVPoolAllocator, TokenAllocator
from .swa_kv_pool import SWAKVPool, TokenKVPool, build_kv_pool


@dataclass(frozen=True)
class DevicePools:
    """`states`: None for models without recurrent layers."""

    kv: TokenKVPool
    states: RecurrentStatePool | None
    allocator: TokenAllocator
    rows: ReqToTokenPool


def build_device_pools(
    config: ModelConfig,
    sizes: PoolSizes,
    *,
    page_size: int,
    dtype: str,
    max_running_requests: int,
    context_len: int,
) -> DevicePools:
    """Everything zero-filled and free. `context_len`: the longest sequence in tokens."""
    kv = build_kv_pool(
        config, size=sizes.tokens, swa_size=sizes.swa_tokens, page_size=page_size, dtype=dtype
    )
    _commit(kv)
    states = build_recurrent_pool(config, sizes.states)
    if states is None:
        rows = ReqToTokenPool(max_running_requests, context_len)
    else:
        rows = HybridReqToTokenPool(
            max_running_requests, context_len, states.size, sizes.track_slots
        )
    return DevicePools(kv, states, build_allocator(kv), rows)


def build_allocator(kv: TokenKVPool) -> TokenAllocator:
    """The allocator for a pool's slots."""
    if isinstance(kv, SWAKVPool):
        return SWATokenToKVPoolAllocator(kv.size, kv.size_swa, kv.page_size, kv)
    return PagedTokenToKVPoolAllocator(kv.size, kv.page_size, kv)


def _commit(kv: TokenKVPool) -> None:
    """Put the buffers on their device from the start, as steps and transfers leave them: else all compiles twice."""
    for half in (kv.full_kv_pool, kv.swa_kv_pool) if isinstance(kv, SWAKVPool) else (kv,):
        half.kv_buffer[:] = jax.device_put(half.kv_buffer, jax.devices()[0])
