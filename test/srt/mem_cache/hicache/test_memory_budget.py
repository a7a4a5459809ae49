"""The host memory budget: readings of cgroups v1 and v2, the size of the pool, and refusals that help."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig, StorageKind
from sgl_jax.srt.mem_cache.hicache.errors import HiCacheConfigError
from sgl_jax.srt.mem_cache.hicache.memory_budget import (
    HostMemory,
    host_pool_pages,
    read_host_memory,
)

GIB = 1 << 30
MIB = 1 << 20
MEMORY = HostMemory(
    total_bytes=20 * GIB, available_bytes=11 * GIB, source="a test"
)  # budget 10 GiB


def config(ratio: float) -> HiCacheConfig:
    return HiCacheConfig(storage=StorageKind.NONE, ratio=ratio)


def refusal(ratio: float, device_pages: int, page_bytes: int, **kwargs: int) -> str:
    with pytest.raises(HiCacheConfigError) as caught:
        host_pool_pages(config(ratio), device_pages, page_bytes, memory=MEMORY, **kwargs)
    message = str(caught.value)
    assert message.startswith(f"--hicache-ratio {ratio:g}")
    assert "\n" not in message
    return message


def suggested(message: str) -> float:
    found = re.search(r"use --hicache-ratio (\S+)", message)
    assert found is not None
    return float(found.group(1))


@pytest.mark.parametrize(
    ("ratio", "device_pages", "expected"),
    [(2.0, 100, 200), (0.5, 101, 50), (0.29, 100, 29), (0.01, 100, 1), (1.999, 1000, 1999)],
)
def test_pages_are_the_ratio_rounded_down(ratio: float, device_pages: int, expected: int) -> None:
    assert host_pool_pages(config(ratio), device_pages, MIB, memory=MEMORY) == expected


def test_exactly_the_budget_fits_and_one_page_more_does_not() -> None:
    pages = MEMORY.budget_bytes // MIB
    assert pages == 10 * 1024
    assert host_pool_pages(config(1.0), pages, MIB, memory=MEMORY) == pages
    refusal(1.0, pages + 1, MIB)


@pytest.mark.parametrize("ratio", [1000.0, 103.0, 1e300])
def test_too_large_suggests_a_ratio_that_fits(ratio: float) -> None:
    message = refusal(ratio, 100, MIB)
    assert "10.00 GiB can be used" in message
    assert host_pool_pages(config(suggested(message)), 100, MIB, memory=MEMORY) > 100


@pytest.mark.parametrize("device_pages", [1, 3, 7, 50, 99, 12_345])
def test_less_than_one_page_suggests_a_ratio_that_gives_one(device_pages: int) -> None:
    message = refusal(0.9 / device_pages, device_pages, MIB)
    assert "less than one host page" in message
    ratio = config(suggested(message))
    assert 1 <= host_pool_pages(ratio, device_pages, MIB, memory=MEMORY) <= 2


def test_processes_share_one_budget() -> None:
    pages = 5 * 1024
    assert host_pool_pages(config(1.0), pages, MIB, processes_on_host=2, memory=MEMORY) == pages
    message = refusal(1.0, pages, MIB, processes_on_host=4)
    assert "2.50 GiB for each of 4 processes" in message


def test_what_the_engine_still_takes_is_left_out() -> None:
    pages = 6 * 1024
    assert host_pool_pages(config(1.0), pages, MIB, engine_bytes=4 * GIB, memory=MEMORY) == pages
    assert "5.00 GiB can be used" in refusal(1.0, pages, MIB, engine_bytes=5 * GIB)


def test_no_memory_at_all_says_so() -> None:
    message = refusal(1.0, 100, MIB, engine_bytes=20 * GIB)
    assert "not even one page fits" in message


@pytest.mark.parametrize("wrong", ["device_pages", "page_bytes", "processes_on_host"])
def test_a_count_below_one_is_a_wrong_call(wrong: str) -> None:
    counts = {"device_pages": 10, "page_bytes": MIB, "processes_on_host": 1, wrong: 0}
    with pytest.raises(ValueError, match=f"{wrong} 0"):
        host_pool_pages(config(1.0), memory=MEMORY, **counts)


def test_the_reserve_is_never_small() -> None:
    assert HostMemory(GIB, GIB, "a test").budget_bytes == GIB - 256 * MIB
    assert HostMemory(100 * GIB, 3 * GIB, "a test").budget_bytes == 0


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """An empty /proc and /sys/fs/cgroup."""
    write(tmp_path / "proc" / "self")
    write(tmp_path / "cgroup")
    return tmp_path / "proc", tmp_path / "cgroup"


def test_without_cgroups_the_machine_counts(roots: tuple[Path, Path]) -> None:
    reading = read_host_memory(*roots)
    assert reading.source == "this machine"
    assert reading.total_bytes == psutil.virtual_memory().total


def test_cgroup_v2_page_cache_is_not_used_memory(roots: tuple[Path, Path]) -> None:
    proc, cgroup = roots
    write(proc / "self", cgroup="0::/app/server\n")
    write(
        cgroup / "app" / "server",
        memory__max=f"{400 * MIB}\n",
        memory__current=f"{300 * MIB}\n",
        memory__stat=f"anon 1\ninactive_file {100 * MIB}\n",
    )
    reading = read_host_memory(proc, cgroup)
    assert reading == HostMemory(400 * MIB, 200 * MIB, "the memory cgroup of this process")


def test_cgroup_v2_parent_may_be_tighter(roots: tuple[Path, Path]) -> None:
    proc, cgroup = roots
    write(proc / "self", cgroup="0::/app/server\n")
    write(cgroup / "app" / "server", memory__max="max\n", memory__current="5\n")
    write(cgroup / "app", memory__max=f"{600 * MIB}\n", memory__current=f"{100 * MIB}\n")
    assert read_host_memory(proc, cgroup).available_bytes == 500 * MIB


def test_cgroup_v1(roots: tuple[Path, Path]) -> None:
    proc, cgroup = roots
    write(proc / "self", cgroup="9:cpu,cpuacct:/\n4:memory:/docker/abc\n")
    write(
        cgroup / "memory" / "docker" / "abc",
        memory__limit_in_bytes=f"{500 * MIB}\n",
        memory__usage_in_bytes=f"{200 * MIB}\n",
        memory__stat=f"total_inactive_file {50 * MIB}\n",
    )
    write(
        cgroup / "memory",
        memory__limit_in_bytes="9223372036854771712\n",
        memory__usage_in_bytes="1\n",
    )
    assert read_host_memory(proc, cgroup).available_bytes == 350 * MIB


def test_cgroup_path_of_the_host_falls_back_to_the_mount(roots: tuple[Path, Path]) -> None:
    """Inside a container /proc/self/cgroup may name a folder that only exists on the host."""
    proc, cgroup = roots
    write(proc / "self", cgroup="4:memory:/kubepods/pod1/c1\n")
    write(
        cgroup / "memory",
        memory__limit_in_bytes=f"{300 * MIB}\n",
        memory__usage_in_bytes=f"{100 * MIB}\n",
    )
    assert read_host_memory(proc, cgroup).available_bytes == 200 * MIB


def test_usage_above_the_limit_is_no_negative_room(roots: tuple[Path, Path]) -> None:
    proc, cgroup = roots
    write(proc / "self", cgroup="0::/\n")
    write(cgroup, memory__max=f"{100 * MIB}\n", memory__current=f"{101 * MIB}\n")
    assert read_host_memory(proc, cgroup).available_bytes == 0


def test_this_machine_can_be_read() -> None:
    reading = read_host_memory()
    assert 0 < reading.available_bytes <= reading.total_bytes
