"""How much host memory the cache may take, decided once at start so that a pool that does not fit is refused in words.

The budget is what is free now, in the machine or in the tightest memory cgroup this process lives in, less a reserve,
less what the engine will still take, divided by the processes on this host that each build a pool of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import psutil

from .config import HiCacheConfig
from .errors import HiCacheConfigError

RESERVE_FRACTION = 0.05
"""Part of all memory that stays free for the rest of the machine."""

RESERVE_MIN_BYTES = 256 << 20
"""The reserve is never less than this."""

_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""


@dataclass(frozen=True)
class HostMemory:
    """One reading of host memory, in bytes; `source` says what bounds it, for messages."""

    total_bytes: int
    available_bytes: int
    source: str

    @property
    def reserve_bytes(self) -> int:
        """What must stay free."""
        return max(RESERVE_MIN_BYTES, int(self.total_bytes * RESERVE_FRACTION))

    @property
    def budget_bytes(self) -> int:
        """What may be taken, for all processes on this host together."""
        return max(0, self.available_bytes - self.reserve_bytes)


def read_host_memory(
    proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")
) -> HostMemory:
    """Free host memory now: the tightest of the machine and the cgroups (v1 or v2) above this process."""
    machine = psutil.virtual_memory()
    readings = [HostMemory(int(machine.total), int(machine.available), "this machine")]
    readings += _cgroup_readings(proc, cgroup_root)
    return min(readings, key=lambda reading: reading.budget_bytes)


def host_pool_pages(
    config: HiCacheConfig,
    device_pages: int,
    page_bytes: int,
    processes_on_host: int = 1,
    engine_bytes: int = 0,
    memory: HostMemory | None = None,
) -> int:
    """Pages of the host pool of this process: floor(ratio * device_pages), if they fit.

    `device_pages` and `page_bytes` are this process's own (its shard). `engine_bytes` is host memory that the engine of
    this process will still take after the reading: on CPU the weights and the device pool, elsewhere about nothing.
    `memory` is the reading to judge by; None reads now.
    Raises HiCacheConfigError if the pool is larger than the budget or smaller than one page, ValueError for a count
    that is not positive.
    """
    if min(device_pages, page_bytes, processes_on_host) < 1:
        raise ValueError(
            f"device_pages {device_pages}, page_bytes {page_bytes} and processes_on_host {processes_on_host} "
            "must each be at least 1"
        )
    memory = memory if memory is not None else read_host_memory()
    # Rounded, because 0.29 * 100 is a hair below 29.
    exact_pages = round(config.ratio * device_pages, 6)
    if exact_pages < 1:
        raise HiCacheConfigError(
            f"--hicache-ratio {config.ratio:g} of {device_pages} device pages is less than one host page; "
            f"use --hicache-ratio {_round_up(1 / device_pages):g} or more"
        )
    budget_bytes = memory.budget_bytes // processes_on_host - engine_bytes
    if exact_pages * page_bytes >= budget_bytes + page_bytes:
        raise HiCacheConfigError(
            _too_large(config, device_pages, page_bytes, processes_on_host, budget_bytes, memory)
        )
    return math.floor(exact_pages)


def _too_large(
    config: HiCacheConfig,
    device_pages: int,
    page_bytes: int,
    processes_on_host: int,
    budget_bytes: int,
    memory: HostMemory,
) -> str:
    asked_bytes = config.ratio * device_pages * page_bytes
    fitting_pages = max(budget_bytes, 0) // page_bytes
    if fitting_pages:
        remedy = f"use --hicache-ratio {_round_down(fitting_pages / device_pages):g} or less"
    else:
        remedy = "not even one page fits: free host memory, or start without --hicache-storage"
    shared = f" for each of {processes_on_host} processes" if processes_on_host > 1 else ""
    return (
        f"--hicache-ratio {config.ratio:g} asks for a host pool of {_gib(asked_bytes)}, "
        f"but {_gib(max(budget_bytes, 0))}{shared} can be used "
        f"({_gib(memory.available_bytes)} free in {memory.source}, less reserve and engine); {remedy}"
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"


def _round_up(value: float) -> float:
    """To three significant digits, never below `value`."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.ceil(round(value / unit, 6)) * unit


def _round_down(value: float) -> float:
    """To three significant digits, never above `value`."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.floor(value / unit) * unit


def _cgroup_readings(proc: Path, cgroup_root: Path) -> list[HostMemory]:
    """One reading for each memory-limited cgroup from this process's up to the root."""
    readings = []
    for line in _read_text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = cgroup_root, _V2_FILES
        elif "memory" in controllers.split(","):
            base, names = cgroup_root / "memory", _V1_FILES
        else:
            continue
        # In a container the path is often the host's and does not exist below the mount; the parents then still do.
        folder = base / path.strip("/")
        for level in (folder, *folder.parents):
            reading = _read_cgroup(level, names)
            if reading is not None:
                readings.append(reading)
            if level == base:
                break
    return readings


@dataclass(frozen=True)
class _CgroupFiles:
    limit: str
    usage: str
    # Page cache that nobody uses: counted as usage, given back under pressure. Reading L3 files grows it.
    reclaimable: str


_V1_FILES = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_FILES = _CgroupFiles("memory.max", "memory.current", "inactive_file")


def _read_cgroup(folder: Path, names: _CgroupFiles) -> HostMemory | None:
    limit = _to_int(_read_text(folder / names.limit))
    usage = _to_int(_read_text(folder / names.usage))
    if limit is None or usage is None or limit >= _UNLIMITED_BYTES:
        return None
    statistics = dict(
        line.split()[:2]
        for line in _read_text(folder / "memory.stat").splitlines()
        if len(line.split()) >= 2
    )
    reclaimable = _to_int(statistics.get(names.reclaimable, "")) or 0
    available = max(0, limit - max(0, usage - reclaimable))
    return HostMemory(limit, available, "the memory cgroup of this process")


def _to_int(text: str) -> int | None:
    """None for "max" and for a file that is not there."""
    return int(text) if text.strip().isdigit() else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
