"""How fast pages go to host memory and back, against memcpy of as many bytes in the same run.

A backup is timed from the gather to the moment the host pool says READY, a load from `get` to the moment the device
buffers hold the pages. `numpy.copyto` between two arrays that exist already takes turns with them. "engine" is the part
of a transfer that the engine's thread spends: gather and submit, or submit and scatter (with `future`: the copies too).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.hicache.async_impl import ASYNC_IMPLS, DeviceJob, create_executor
from sgl_jax.srt.mem_cache.hicache.device_buffers import BufferRef, DeviceBuffers
from sgl_jax.srt.mem_cache.hicache.host_pool.host_page import HostPage
from sgl_jax.srt.mem_cache.hicache.host_pool.registry import HOST_POOL_SCHEMES, create_host_pool
from sgl_jax.srt.mem_cache.hicache.transfer import PageTransfer, StagedPages
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind, TransferId

from .record import Record, measured, rates, seconds_of

_WAIT_S = 120.0


@dataclass(frozen=True)
class Workload:
    """Pages of `num_buffers` rows each; `row_shape` is one page in one buffer.

    The device pool has `pool_factor` times two transfers' pages.
    """

    name: str
    num_pages: int
    num_buffers: int
    row_shape: tuple[int, ...]
    dtype: str = "float32"
    pool_factor: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes of one transfer."""
        row_bytes = int(np.prod(self.row_shape)) * jax.numpy.dtype(self.dtype).itemsize
        return self.num_pages * self.num_buffers * row_bytes


WORKLOADS = {
    w.name: w
    for w in (
        Workload("64x4MB-f32", 64, 16, (64, 8, 128)),
        Workload("64x4MB-bf16", 64, 16, (64, 8, 256), "bfloat16"),
        Workload("64x4MB-bf16-large-pool", 64, 16, (64, 8, 256), "bfloat16", pool_factor=4),
        Workload("128x740KB-f32", 128, 30, (16, 6, 64)),
        Workload("256x64KB-f32", 256, 16, (8, 128)),
        Workload("8x16KB-f32", 8, 4, (8, 128)),
    )
}
DEFAULT_WORKLOADS = [name for name in WORKLOADS if not name.startswith("8x")]


class Mover:
    """Device buffers of one workload, and one scheme and executor moving their pages."""

    def __init__(self, workload: Workload, scheme: str, executor: str) -> None:
        self.workload = workload
        num_rows = 2 * workload.pool_factor * workload.num_pages + 1
        shape = (num_rows, *workload.row_shape)
        self.holder = [
            jax.numpy.full(shape, i, workload.dtype) for i in range(workload.num_buffers)
        ]
        buffers = DeviceBuffers(
            [BufferRef(f"k{i}", self.holder, i) for i in range(len(self.holder))]
        )
        layout = buffers.layout(ComponentKind.FULL, 1)
        self.transfer = PageTransfer(buffers, layout)
        self.pool = create_host_pool(
            scheme, workload.num_pages, layout, self.transfer.host_memory()
        )
        self.executor = create_executor(executor)
        rows = np.random.default_rng(0).permutation(num_rows - 1).astype(np.int32) + 1
        self.sources = rows[: workload.num_pages]
        self.targets = rows[workload.num_pages : 2 * workload.num_pages]
        self.engine_s = {"backup": 0.0, "load": 0.0}

    def backup(self) -> npt.NDArray[np.int32]:
        """Device rows to READY host pages."""
        host_pages = self.pool.alloc(self.workload.num_pages)
        if host_pages is None:
            raise RuntimeError("the pool is full")
        pages: list[HostPage] = []

        def submit() -> None:
            staged = self.transfer.gather(self.sources)

            def start() -> list[jax.Array]:
                pages.extend(self.transfer.to_host(staged))
                return [array for page in pages for array in page]

            self._submit(start, lambda: self.pool.put(host_pages, pages))

        self.engine_s["backup"] = seconds_of(submit)
        self._settle()
        self.pool.mark_ready(host_pages)
        jax.block_until_ready([page.arrays for page in self.pool.get(host_pages)])  # type: ignore[no-untyped-call]
        return host_pages

    def load(self, host_pages: npt.NDArray[np.int32]) -> None:
        """READY host pages to device rows."""
        loaded: list[StagedPages] = []

        def start() -> list[jax.Array]:
            loaded.append(self.transfer.to_device(self.pool.get(host_pages)))
            return loaded[0].arrays

        submit_s = seconds_of(lambda: self._submit(start, lambda: None))
        self._settle()
        scatter_s = seconds_of(lambda: self.transfer.scatter(loaded[0], self.targets))
        self.engine_s["load"] = submit_s + scatter_s
        jax.block_until_ready(self.holder)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Stop the workers."""
        self.executor.shutdown(_WAIT_S)

    def _submit(self, start: Callable[[], list[jax.Array]], finish: Callable[[], None]) -> None:
        self.executor.submit_device(DeviceJob(TransferId(0), start, finish))

    def _settle(self) -> None:
        if not self.executor.wait_any(_WAIT_S):
            raise TimeoutError("a transfer did not end")
        for completion in self.executor.poll():
            if completion.error is not None:
                raise RuntimeError(completion.error)


def measure(workload: Workload, scheme: str, executor: str, repeats: int) -> list[Record]:
    """Backup and load, each repeated between repeats of memcpy."""
    mover = Mover(workload, scheme, executor)
    source, target = np.ones(workload.num_bytes, np.uint8), np.ones(workload.num_bytes, np.uint8)
    spent: dict[str, list[float]] = {"memcpy": [], "backup": [], "load": []}
    engine_ms: dict[str, list[float]] = {"backup": [], "load": []}
    for repeat in range(repeats + 2):
        held: list[npt.NDArray[np.int32]] = []
        took_s = {
            "memcpy": seconds_of(lambda: np.copyto(target, source)),
            "backup": seconds_of(lambda held=held: held.append(mover.backup())),  # type: ignore[misc]
            "load": seconds_of(lambda held=held: mover.load(held[0])),  # type: ignore[misc]
        }
        mover.pool.free(held[0])
        if repeat >= 2:  # the first ones compile and touch fresh memory
            for what, s in took_s.items():
                spent[what].append(s)
            for what, s in mover.engine_s.items():
                engine_ms[what].append(s * 1e3)
    mover.close()
    gb = {what: rates(workload.num_bytes / 1e9, seconds) for what, seconds in spent.items()}
    params: dict[str, Any] = {"pages": workload.name, "scheme": scheme, "executor": executor}
    moved = [measured(f"transfer {w}", gb[w], "GB/s", gb["memcpy"], **params) for w in engine_ms]
    return moved + [
        measured(f"transfer {what}, engine", ms, "ms", **params) for what, ms in engine_ms.items()
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--pages", nargs="+", choices=WORKLOADS, default=DEFAULT_WORKLOADS)
    parser.add_argument("--schemes", nargs="+", choices=HOST_POOL_SCHEMES, default=["per_block"])
    parser.add_argument("--executors", nargs="+", choices=ASYNC_IMPLS, default=["threadpool"])


def run(args: argparse.Namespace) -> list[Record]:
    """Every workload with every scheme and executor asked for."""
    combinations: Sequence[tuple[str, str, str]] = list(
        itertools.product(args.pages, args.schemes, args.executors)
    )
    return [
        record
        for pages, scheme, executor in combinations
        for record in measure(WORKLOADS[pages], scheme, executor, args.repeats)
    ]
