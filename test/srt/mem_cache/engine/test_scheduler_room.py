"""Prefills that are cut at checkpoints share steps: who gives way where the pools hold less than the tree promised."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from engine_fakes import expected_output
from model_kinds import both_loops
from null_tree import NullTree
from scheduler_traffic import random_tokens
from scheduler_world import SchedulerWorld


def _optimist(world: Callable[[], SchedulerWorld]) -> type[NullTree]:
    """A tree that says, while there are requests, that there is more room than there is."""

    class Optimist(NullTree):
        def full_evictable_size(self, dp_rank: int = 0) -> int:
            return 1000 if world().scheduler.busy() else 0

        evictable_size = swa_evictable_size = full_evictable_size

    return Optimist


@both_loops
def test_what_an_older_prompt_finds_no_room_for_no_younger_one_takes(
    overlap: bool, rng: np.random.Generator
) -> None:
    # Chunks of 2, 2, 1 pages and of 2, 1. After the first two a page is free: too little for the older request.
    world = SchedulerWorld(
        num_pages=5, states=0, interval=8, tree=_optimist(lambda: world), overlap=overlap
    )
    prompts = [random_tokens(rng, 20), random_tokens(rng, 12)]
    clients = [world.submit(str(i), prompt, 1) for i, prompt in enumerate(prompts)]
    world.run()
    order = [[item.rid for item in batch.items] for batch in world.runner.batches]
    assert order == [["0", "1"], ["0"], ["0"], ["1"], ["1"]]
    assert [client.last.stats.num_retractions for client in clients] == [0, 1]
    for prompt, client in zip(prompts, clients, strict=True):
        assert client.tokens == expected_output(prompt, 1)


@both_loops
def test_prefills_cut_at_borders_share_a_step_and_the_younger_gives_way(
    overlap: bool, rng: np.random.Generator
) -> None:
    """Two prompts that fit the pool one after the other only: both are begun, one must start again."""

    world = SchedulerWorld(
        num_pages=20,
        window=200,
        swa_pages=20,
        states=0,
        interval=8,
        tree=_optimist(lambda: world),
        overlap=overlap,
    )
    prompts = [random_tokens(rng, 60), random_tokens(rng, 50)]
    clients = [world.submit(str(i), prompt, 4) for i, prompt in enumerate(prompts)]
    world.step()
    assert [item.rid for item in world.runner.batches[0].items] == ["0", "1"]
    world.run()
    for prompt, client in zip(prompts, clients, strict=True):
        assert client.tokens == expected_output(prompt, 4)
    assert [client.last.stats.num_retractions > 0 for client in clients] == [False, True]
