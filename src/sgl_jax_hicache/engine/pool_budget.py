"""Whether the device pool fits, told in one line at start instead of by the allocator."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from sgl_jax.srt.mem_cache.hicache.memory_budget import RESERVE_FRACTION, read_host_memory

from .engine_args import ArgumentError


@dataclass(frozen=True)
class DeviceRoom:
    """What weights and pool may take together; `source` says where the number comes from, for messages."""

    budget_bytes: int
    source: str


def read_device_room() -> DeviceRoom | None:
    """Free memory of the first device now, less a reserve; None where the device does not tell."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        memory = read_host_memory()
        return DeviceRoom(
            memory.budget_bytes, f"{_gib(memory.available_bytes)} free in {memory.source}"
        )
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    limit_bytes = int(stats["bytes_limit"])
    free_bytes = max(0, limit_bytes - int(stats.get("bytes_in_use", 0)))
    # A step needs room to compute in.
    reserve_bytes = int(limit_bytes * RESERVE_FRACTION)
    return DeviceRoom(
        max(0, free_bytes - reserve_bytes), f"{_gib(free_bytes)} free on {device.device_kind}"
    )


def check_device_pool(
    max_total_tokens: int,
    page_size: int,
    bytes_per_token: float,
    fixed_bytes: int,
    room: DeviceRoom | None,
) -> None:
    """Raises ArgumentError, with the largest pool that fits, if this one and `fixed_bytes` do not fit `room`.

    `bytes_per_token`: what a token of the pool costs, that of a smaller pool beside it included. The pool has a page
    more than `max_total_tokens`, for what padding writes.
    """
    if room is None:
        return
    left_bytes = max(0, room.budget_bytes - fixed_bytes)
    pool_bytes = (max_total_tokens + page_size) * bytes_per_token
    if pool_bytes <= left_bytes:
        return
    fitting_tokens = int(left_bytes // (page_size * bytes_per_token) - 1) * page_size
    if fitting_tokens > 0:
        remedy = f"use --max-total-tokens {fitting_tokens} or less"
    else:
        remedy = "not even one page fits: free memory, or choose a smaller model"
    raise ArgumentError(
        f"--max-total-tokens {max_total_tokens} asks for a device pool of {_gib(pool_bytes)}, "
        f"but {_gib(left_bytes)} can be used ({room.source}, less reserve, weights and states); {remedy}"
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
