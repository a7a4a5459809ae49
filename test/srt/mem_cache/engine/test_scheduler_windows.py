"""The scheduler with a pool for sliding windows: what leaves the window is freed, and a small pool suffices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_fakes import expected_output
from model_kinds import both_loops
from null_tree import NullTree
from page_tree import PageTree
from scheduler_traffic import random_tokens
from scheduler_world import SchedulerWorld, radix_tree

from sgl_jax_hicache.engine.fault import SchedulerFault
from sgl_jax_hicache.engine.forward_batch import ForwardMode
from sgl_jax_hicache.engine.outputs import FinishKind

trees = pytest.mark.parametrize(
    "tree", [NullTree, PageTree, radix_tree], ids=["null", "plain", "radix"]
)


def _swa_in_use(world: SchedulerWorld) -> int:
    return world.allocator.size_swa - world.allocator.swa_available_size()


@both_loops
@trees
@pytest.mark.parametrize("window", [1, 3, 4, 5, 10, 64])
def test_pages_before_the_window_are_freed_and_nobody_misses_them(
    overlap: bool, tree: Any, window: int, rng: np.random.Generator
) -> None:
    world = SchedulerWorld(
        num_pages=64, window=window, swa_pages=48, tree=tree, overlap=overlap, chunk=16
    )
    prompt = random_tokens(rng, 50)
    client = world.submit("a", prompt, 70)
    most = 0
    while world.scheduler.busy():
        world.step()
        world.allocator.check_invariants()
        held = _swa_in_use(world) - world.tree.swa_evictable_size()
        if world.runner.batches[-1].mode is ForwardMode.DECODE:
            most = max(most, held)
    assert client.tokens == expected_output(prompt, 70)
    window_pages = -(-(window - 1) // 4) + 1
    assert most <= 4 * window_pages * (1 if tree is NullTree else 2)
    world.scheduler.check_idle()


@both_loops
@trees
def test_a_request_as_long_as_the_full_pool_runs_in_a_small_swa_pool(
    overlap: bool, tree: Any, rng: np.random.Generator
) -> None:
    # Bounds of window 10 and chunk 16: 20 tokens kept, and as many more: 10 pages.
    world = SchedulerWorld(
        num_pages=64, window=10, swa_pages=10, tree=tree, overlap=overlap, rows=2
    )
    prompt = random_tokens(rng, 200)
    client = world.submit("a", prompt, 57)  # 256 slots, the whole pool
    world.run()
    assert client.tokens == expected_output(prompt, 57)
    assert client.last.stats.num_retractions == 0


@both_loops
@trees
def test_a_small_swa_pool_serves_many_requests_in_turn(
    overlap: bool, tree: Any, rng: np.random.Generator
) -> None:
    world = SchedulerWorld(
        num_pages=256, window=10, swa_pages=14, tree=tree, overlap=overlap, reserve=0.0
    )
    prompts = [random_tokens(rng, int(n)) for n in rng.integers(1, 80, 8)]
    clients = [world.submit(str(i), prompt, 40) for i, prompt in enumerate(prompts)]
    world.run()
    for prompt, client in zip(prompts, clients, strict=True):
        assert client.tokens == expected_output(prompt, 40)
    assert clients[0].last.stats.num_retractions == 0


@both_loops
@trees
def test_full_reserve_never_retracts_for_a_window(
    overlap: bool, tree: Any, rng: np.random.Generator
) -> None:
    world = SchedulerWorld(
        num_pages=256, window=10, swa_pages=24, tree=tree, overlap=overlap, reserve=1.0
    )
    clients = [world.submit(str(i), random_tokens(rng, 30), 30) for i in range(6)]
    world.run()
    assert sum(client.last.stats.num_retractions for client in clients) == 0
    assert max(len(batch.items) for batch in world.runner.batches) > 1


@both_loops
def test_a_request_for_which_nothing_can_make_room_ends_with_an_error(
    overlap: bool, rng: np.random.Generator
) -> None:
    class Stingy(NullTree):
        """Keeps every SWA page until the request ends."""

        def evict_req_swa(self, req: Any, pre_len: int, dp_rank: int = 0) -> None:
            pass

    world = SchedulerWorld(num_pages=64, window=10, swa_pages=12, tree=Stingy, overlap=overlap)
    clients = [
        world.submit("prefill", random_tokens(rng, 100), 4),
        world.submit("decode", [1, 2], 100),
    ]
    world.run()
    for client in clients:
        assert client.last.finish is not None
        assert client.last.finish.kind is FinishKind.ERROR
        assert client.last.finish.message == "the device pools have no room left for this request"


def test_a_window_that_is_not_there_is_a_fault(rng: np.random.Generator) -> None:
    class Eager(NullTree):
        """Frees a page too many."""

        def evict_req_swa(self, req: Any, pre_len: int, dp_rank: int = 0) -> None:
            super().evict_req_swa(req, pre_len + self.page_size, dp_rank)

    world = SchedulerWorld(num_pages=64, window=10, swa_pages=32, tree=Eager)
    world.submit("a", random_tokens(rng, 20), 20)
    with pytest.raises(SchedulerFault, match=r"the window before token \d+ is not in the SWA pool"):
        world.run()
