"""What a page of the host pool costs to take and give back, in pools of different sizes.

The limit of the larger pools is the smallest one, so their ratio is the growth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgl_jax.srt.mem_cache.hicache.device_buffers import BufferRef, DeviceBuffers
from sgl_jax.srt.mem_cache.hicache.host_pool.host_page import HostPage
from sgl_jax.srt.mem_cache.hicache.host_pool.per_block import PerBlockHostPool
from sgl_jax.srt.mem_cache.hicache.transfer import PageTransfer
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind

from .record import Record, measured, side_by_side


def make_pool(num_pages: int) -> PerBlockHostPool:
    """A pool of pages of four bytes."""
    holder = [jnp.zeros((2, 1), jnp.float32)]
    buffers = DeviceBuffers([BufferRef("k", holder, 0)])
    layout = buffers.layout(ComponentKind.FULL, 1)
    return PerBlockHostPool(num_pages, layout, PageTransfer(buffers, layout).host_memory())


def measure_pools(sizes: Sequence[int], num_pages: int, repeats: int = 50) -> list[Record]:
    """Every operation on `num_pages` pages at once in pools of every size, in turns."""
    pools = [make_pool(num_slots) for num_slots in sizes]
    page = HostPage((jax.device_put(np.zeros(1, np.uint32)),))

    def alloc_free(pool: PerBlockHostPool) -> None:
        pool.free(_alloc(pool, num_pages))

    def whole_life(pool: PerBlockHostPool) -> None:
        host_pages = _alloc(pool, num_pages)
        pool.put(host_pages, [page] * num_pages)
        pool.mark_ready(host_pages)
        pool.free(host_pages)

    records: list[Record] = []
    for name, action in (
        ("host pool alloc + free", alloc_free),
        ("host pool alloc + put + mark_ready + free", whole_life),
    ):
        actions = [lambda pool=pool, action=action: action(pool) for pool in pools]
        spent = side_by_side(actions, repeats)
        first_us = [s / num_pages * 1e6 for s in spent[0]]
        for num_slots, seconds in zip(sizes, spent, strict=True):
            us = [s / num_pages * 1e6 for s in seconds]
            records.append(measured(name, us, "us/page", first_us, slots=num_slots))
    return records


def _alloc(pool: PerBlockHostPool, num_pages: int) -> Any:
    host_pages = pool.alloc(num_pages)
    if host_pages is None:
        raise RuntimeError("the pool is full")
    return host_pages
