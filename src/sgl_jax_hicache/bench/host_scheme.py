"""How fast pages go to host memory and back, for both host schemes and both executors, against memcpy.

    python -m sgl_jax_hicache.bench.host_scheme [--json FILE] [--repeats N]

A backup is timed from the gather to the moment the host pool says READY, a load from `get` to the moment the device
buffers hold the pages. The yardstick is `numpy.copyto` of as many bytes between two arrays that exist already, in the
same run, one repeat of it between the repeats of what it is compared with.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import jax
import numpy as np
import numpy.typing as npt

from sgl_jax_hicache import overlay

overlay.activate()

from sgl_jax.srt.mem_cache.hicache.async_impl import (  # noqa: E402
    ASYNC_IMPLS,
    DeviceJob,
    TransferExecutor,
    create_executor,
)
from sgl_jax.srt.mem_cache.hicache.device_buffers import BufferRef, DeviceBuffers  # noqa: E402
from sgl_jax.srt.mem_cache.hicache.host_pool.base import HostKVPool, HostPage  # noqa: E402
from sgl_jax.srt.mem_cache.hicache.host_pool.registry import (  # noqa: E402
    HOST_POOL_SCHEMES,
    create_host_pool,
)
from sgl_jax.srt.mem_cache.hicache.transfer import PageTransfer, StagedPages  # noqa: E402
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind, TransferId  # noqa: E402
from sgl_jax_hicache.provenance import commit, machine  # noqa: E402

_WAIT_S = 120.0


@dataclass(frozen=True)
class Workload:
    """Pages of `num_buffers` rows each; `row_shape` is one page in one buffer."""

    name: str
    num_pages: int
    num_buffers: int
    row_shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return (
            self.num_buffers * int(np.prod(self.row_shape)) * jax.numpy.dtype(self.dtype).itemsize
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of one transfer."""
        return self.num_pages * self.page_bytes


WORKLOADS = (
    Workload("64 x 4 MB f32", 64, 16, (64, 8, 128)),
    Workload("128 x 740 KB f32", 128, 30, (16, 6, 64)),
    Workload("256 x 64 KB f32", 256, 16, (8, 128)),
    Workload("64 x 4 MB bf16", 64, 16, (64, 8, 256), "bfloat16"),
)


@dataclass(frozen=True)
class Row:
    """One measurement. Times in ms; `of_memcpy` is bytes per second in units of memcpy's in the same run."""

    workload: str
    scheme: str
    executor: str
    direction: str
    median_ms: float
    p90_ms: float
    gb_per_s: float
    of_memcpy: float
    submit_ms: float


class Bench:
    """Device buffers of one workload, and one scheme and executor moving their pages."""

    def __init__(self, workload: Workload, scheme: str, executor: str) -> None:
        self.workload = workload
        num_rows = 2 * workload.num_pages + 1
        shape = (num_rows, *workload.row_shape)
        holder = [jax.numpy.full(shape, i, workload.dtype) for i in range(workload.num_buffers)]
        refs = [BufferRef(f"k{i}", holder, i) for i in range(workload.num_buffers)]
        self.holder = holder
        buffers = DeviceBuffers(refs)
        layout = buffers.layout(ComponentKind.FULL, 1)
        self.transfer = PageTransfer(buffers, layout)
        self.pool: HostKVPool = create_host_pool(
            scheme, workload.num_pages, layout, self.transfer.host_memory()
        )
        self.executor: TransferExecutor = create_executor(executor)
        rows = np.random.default_rng(0).permutation(num_rows - 1).astype(np.int32) + 1
        self.sources, self.targets = rows[: workload.num_pages], rows[workload.num_pages :]
        self.submit_s = {"backup": 0.0, "load": 0.0}

    def backup(self) -> npt.NDArray[np.int32]:
        """Device rows to READY host pages."""
        host_pages = self.pool.alloc(self.workload.num_pages)
        if host_pages is None:
            raise RuntimeError("the pool is full")
        begun_s = time.perf_counter()
        staged = self.transfer.gather(self.sources)
        pages: list[HostPage] = []

        def start() -> list[jax.Array]:
            pages.extend(self.transfer.to_host(staged))
            return [array for page in pages for array in page]

        def finish() -> None:
            self.pool.put(host_pages, pages)

        self.executor.submit_device(DeviceJob(TransferId(0), start, finish))
        self.submit_s["backup"] = time.perf_counter() - begun_s
        self._settle()
        self.pool.mark_ready(host_pages)
        jax.block_until_ready(self.pool.get(host_pages))  # type: ignore[no-untyped-call]
        return host_pages

    def load(self, host_pages: npt.NDArray[np.int32]) -> None:
        """READY host pages to device rows."""
        loaded: list[StagedPages] = []
        begun_s = time.perf_counter()

        def start() -> list[jax.Array]:
            loaded.append(self.transfer.to_device(self.pool.get(host_pages)))
            return loaded[0].arrays

        self.executor.submit_device(DeviceJob(TransferId(0), start, lambda: None))
        self.submit_s["load"] = time.perf_counter() - begun_s
        self._settle()
        begun_s = time.perf_counter()
        self.transfer.scatter(loaded[0], self.targets)
        self.submit_s["load"] += time.perf_counter() - begun_s
        jax.block_until_ready(self.holder)  # type: ignore[no-untyped-call]

    def _settle(self) -> None:
        if not self.executor.wait_any(_WAIT_S):
            raise TimeoutError("a transfer did not end")
        for completion in self.executor.poll():
            if completion.error is not None:
                raise RuntimeError(completion.error)


def seconds_of(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    begun_s = time.perf_counter()
    action()
    return time.perf_counter() - begun_s


def measure(workload: Workload, scheme: str, executor: str, repeats: int) -> list[Row]:
    """Backup and load, each repeated between repeats of memcpy."""
    bench = Bench(workload, scheme, executor)
    source, target = np.ones(workload.num_bytes, np.uint8), np.ones(workload.num_bytes, np.uint8)
    times: dict[str, list[float]] = {"memcpy": [], "backup": [], "load": []}
    submits: dict[str, list[float]] = {"backup": [], "load": []}
    for repeat in range(repeats + 2):
        held: list[npt.NDArray[np.int32]] = []
        memcpy_s = seconds_of(lambda: np.copyto(target, source))
        backup_s = seconds_of(lambda held=held: held.append(bench.backup()))  # type: ignore[misc]
        load_s = seconds_of(lambda held=held: bench.load(held[0]))  # type: ignore[misc]
        bench.pool.free(held[0])
        if repeat >= 2:  # the first ones compile and touch fresh memory
            times["memcpy"].append(memcpy_s)
            times["backup"].append(backup_s)
            times["load"].append(load_s)
            submits["backup"].append(bench.submit_s["backup"])
            submits["load"].append(bench.submit_s["load"])
    bench.executor.shutdown(_WAIT_S)
    memcpy_s = float(np.median(times["memcpy"]))
    rows = [make_row(workload, "-", "-", "memcpy", times["memcpy"], memcpy_s, [0.0])]
    for direction in ("backup", "load"):
        rows.append(
            make_row(
                workload,
                scheme,
                executor,
                direction,
                times[direction],
                memcpy_s,
                submits[direction],
            )
        )
    return rows


def make_row(
    workload: Workload,
    scheme: str,
    executor: str,
    direction: str,
    seconds: Sequence[float],
    memcpy_s: float,
    submit_s: Sequence[float],
) -> Row:
    """Median and P90 of repeated times."""
    median_s = float(np.median(seconds))
    return Row(
        workload.name,
        scheme,
        executor,
        direction,
        round(median_s * 1e3, 3),
        round(float(np.percentile(seconds, 90)) * 1e3, 3),
        round(workload.num_bytes / median_s / 1e9, 2),
        round(memcpy_s / median_s, 3),
        round(float(np.median(submit_s)) * 1e3, 3),
    )


def setup() -> dict[str, object]:
    """Where and with what this ran."""
    device = jax.devices()[0]
    command = shlex.join(["python", "-m", "sgl_jax_hicache.bench.host_scheme", *sys.argv[1:]])
    return {
        "command": command,
        "device": f"{device.platform} {device.device_kind}",
        "commit": commit(),
        **machine(),
    }


def table(rows: Sequence[Row]) -> str:
    """Rows as aligned text."""
    head = f"{'workload':18}{'scheme':11}{'executor':12}{'direction':11}"
    head += f"{'median ms':>10}{'P90 ms':>10}{'GB/s':>8}{'of memcpy':>11}{'submit ms':>11}"
    lines = [head]
    for row in rows:
        lines.append(
            f"{row.workload:18}{row.scheme:11}{row.executor:12}{row.direction:11}"
            f"{row.median_ms:10.2f}{row.p90_ms:10.2f}{row.gb_per_s:8.2f}{row.of_memcpy:11.3f}"
            f"{row.submit_ms:11.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file as well")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="timed repeats")
    args = parser.parse_args()
    rows: list[Row] = []
    for workload, scheme, executor in itertools.product(
        WORKLOADS, sorted(HOST_POOL_SCHEMES), sorted(ASYNC_IMPLS)
    ):
        rows += measure(workload, scheme, executor, args.repeats)
    about = setup()
    print("\n".join(f"{key}: {value}" for key, value in about.items()))
    print(
        "submit ms: engine thread time of gather + submit, or of submit + scatter (future: copies too)"
    )
    print(table(rows))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({**about, "rows": [asdict(row) for row in rows]}, file, indent=1)


if __name__ == "__main__":
    main()
