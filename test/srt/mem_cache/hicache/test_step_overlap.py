"""The copy of step N-1's pages to the host runs while forward step N runs, with either executor.

A gate inside the forward step (a host callback that waits) holds step N; the backup of the pages that step N-1 wrote
must be complete, and right, before the gate opens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from page_fakes import PAGE_SIZE, Rig, make_rig

from sgl_jax.srt.mem_cache.hicache.async_impl import create_executor
from sgl_jax.srt.mem_cache.hicache.controller import ComponentIO, HiCacheController
from sgl_jax.srt.mem_cache.hicache.host_pool.registry import create_host_pool
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind

TIMEOUT_S = 60.0
NUM_ROWS = 9
PAGES = np.array([2, 5, 7], np.int32)


class GatedForward:
    """A forward step that donates the buffers, waits for `gate` in the middle, and writes every page."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.gate = threading.Event()

        def wait(value: np.ndarray) -> np.ndarray:
            self.started.set()
            assert self.gate.wait(TIMEOUT_S), "nobody opened the gate"
            return np.asarray(value)

        @partial(jax.jit, donate_argnums=0)
        def forward(buffers: list[jax.Array]) -> list[jax.Array]:
            zero = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(0))
            return [jnp.zeros_like(buffer) + zero + jnp.float32(5) for buffer in buffers]

        self._forward = forward

    def run(self, rig: Rig) -> None:
        """As the engine's forward thread does: dispatch, put the new buffers back, wait."""
        rig.holder[:] = jax.block_until_ready(self._forward(list(rig.holder)))


@pytest.fixture(params=["threadpool", "future"])
def async_impl(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def forward_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, thread_name_prefix="forward") as pool:
        yield pool


def test_the_copy_of_the_last_step_ends_while_the_next_step_runs(
    async_impl: str, forward_thread: ThreadPoolExecutor, rng: np.random.Generator
) -> None:
    rig = make_rig(rng, NUM_ROWS, [((PAGE_SIZE, 8), np.float32)] * 2)
    pool = create_host_pool("per_block", 4, rig.layout, rig.transfer.host_memory())
    executor = create_executor(async_impl)
    controller = HiCacheController(
        {ComponentKind.FULL: ComponentIO(rig.transfer, pool)}, executor, max_backup_bytes=1 << 20
    )
    controller.precompile()
    step = GatedForward()
    host_pages = pool.alloc(len(PAGES))
    assert host_pages is not None
    try:
        backup = controller.write(ComponentKind.FULL, host_pages, PAGES)
        running = forward_thread.submit(step.run, rig)
        assert step.started.wait(TIMEOUT_S), "forward N did not start"
        assert controller.wait(backup, TIMEOUT_S), "the copy waits for forward N"
        assert not running.done(), "forward N ended although its gate is shut"
        assert backup.result is not None and backup.result.ok, backup.result
        for page, row in zip(pool.read_bytes(host_pages), PAGES, strict=True):
            got = np.concatenate([part.reshape(-1).view(np.uint8) for part in page])
            want = np.concatenate([content[row] for content in rig.contents])
            np.testing.assert_array_equal(got, want)
    finally:
        step.gate.set()
        running.result(TIMEOUT_S)
        assert executor.shutdown(TIMEOUT_S)
    assert all((np.asarray(buffer) == 5).all() for buffer in rig.holder)
