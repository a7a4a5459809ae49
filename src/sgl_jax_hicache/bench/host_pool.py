"""What a page of the host pool costs to take and give back, and that it does not depend on the size of the pool.

The limit of the larger pools is the smallest one, so their ratio is the growth.
"""

from __future__ import annotations

import argparse
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

NUM_PAGES = 4_096


def make_pool(num_pages: int) -> PerBlockHostPool:
    """A pool of pages of four bytes."""
    holder = [jnp.zeros((2, 1), jnp.float32)]
    buffers = DeviceBuffers([BufferRef("k", holder, 0)])
    layout = buffers.layout(ComponentKind.FULL, 1)
    return PerBlockHostPool(num_pages, layout, PageTransfer(buffers, layout).host_memory())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument(
        "--slots", type=int, nargs="+", default=[8_192, 81_920, 1_048_576], metavar="N"
    )
    parser.add_argument("--pages", type=int, default=NUM_PAGES, help="pages at once")
    parser.add_argument("--repeats", type=int, default=50)


def run(args: argparse.Namespace) -> list[Record]:
    """Every operation in pools of every size, in turns. Raises ArgumentTypeError if the pages do not fit."""
    if min(args.slots) < args.pages:
        raise argparse.ArgumentTypeError(f"a pool of {min(args.slots)} slots has no {args.pages}")
    pools = [make_pool(num_slots) for num_slots in args.slots]
    page = HostPage((jax.device_put(np.zeros(1, np.uint32)),))

    def alloc_free(pool: PerBlockHostPool) -> None:
        pool.free(_alloc(pool, args.pages))

    def whole_life(pool: PerBlockHostPool) -> None:
        host_pages = _alloc(pool, args.pages)
        pool.put(host_pages, [page] * args.pages)
        pool.mark_ready(host_pages)
        pool.free(host_pages)

    records: list[Record] = []
    for name, action in (
        ("host pool alloc + free", alloc_free),
        ("host pool alloc + put + mark_ready + free", whole_life),
    ):
        actions = [lambda pool=pool, action=action: action(pool) for pool in pools]
        spent = side_by_side(actions, args.repeats)
        first_us = [s / args.pages * 1e6 for s in spent[0]]
        for num_slots, seconds in zip(args.slots, spent, strict=True):
            us = [s / args.pages * 1e6 for s in seconds]
            records.append(measured(name, us, "us/page", first_us, slots=num_slots))
    return records


def _alloc(pool: PerBlockHostPool, num_pages: int) -> Any:
    host_pages = pool.alloc(num_pages)
    if host_pages is None:
        raise RuntimeError("the pool is full")
    return host_pages
