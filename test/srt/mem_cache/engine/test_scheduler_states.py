"""The scheduler with a pool for recurrent states: where snapshots are taken, and what a hit starts from."""

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

from sgl_jax.srt.mem_cache.hicache.tree_types import MatchPrefixParams, MatchResult
from sgl_jax_hicache.engine.fault import SchedulerFault

reusing = pytest.mark.parametrize("tree", [PageTree, radix_tree], ids=["plain", "radix"])


@both_loops
def test_states_that_the_tree_keeps_make_way_for_requests(
    overlap: bool, rng: np.random.Generator
) -> None:
    world = SchedulerWorld(
        num_pages=256, states=4, interval=4, rows=2, tree=PageTree, overlap=overlap
    )
    world.submit("alone", random_tokens(rng, 60), 2)
    world.run()
    assert world.rows.recurrent_available_size() < 2 * world.rows.request_owned_slots
    clients = [world.submit(str(i), prompt := random_tokens(rng, 30), 4) for i in range(2)]
    world.run()
    assert len(world.runner.batches[-1].items) == 2
    assert clients[1].tokens == expected_output(prompt, 4)


@both_loops
@pytest.mark.parametrize("interval", [4, 8, 12])
def test_states_are_tracked_at_every_border_and_nowhere_else(
    overlap: bool, interval: int, rng: np.random.Generator
) -> None:
    world = SchedulerWorld(
        num_pages=64, states=0, interval=interval, tree=NullTree, overlap=overlap
    )
    prompt = random_tokens(rng, 45)
    world.submit("a", prompt, 30)
    world.run()
    seen, used = [], set()
    for batch in world.runner.batches:
        (item,) = batch.items
        seq_len = item.prefix_len + item.num_tokens
        assert item.prefix_len // interval == (seq_len - 1) // interval, "crosses a border"
        assert item.states.track not in (item.states.running, item.states.cow_src or -1)
        if item.states.track:
            seen.append(seq_len)
            used.add(item.states.track)
    assert seen == list(range(interval, 45 + 30, interval))
    assert len(used) == (2 if overlap else 1)


@both_loops
@reusing
def test_a_hit_starts_from_a_copy_of_the_trees_state(
    overlap: bool, tree: Any, rng: np.random.Generator
) -> None:
    world = SchedulerWorld(num_pages=64, states=8, interval=16, tree=tree, overlap=overlap)
    stem = random_tokens(rng, 40)
    first = world.submit("first", [*stem, 1, 2], 8)
    world.run()
    second = world.submit("second", [*stem, 3], 8)
    third = world.submit("third", [*stem[:20], 4], 8)
    world.run()
    assert first.last.stats.tiers.device == 0
    assert second.last.stats.tiers.device == 32, "40 is no border"
    assert third.last.stats.tiers.device == 16
    assert second.tokens == expected_output([*stem, 3], 8)
    assert third.tokens == expected_output([*stem[:20], 4], 8)
    assert world.runner.num_cow == 2


def test_a_prefix_without_its_state_is_a_fault(rng: np.random.Generator) -> None:
    class Forgetful(PageTree):
        """Finds prefixes, but does not say where their states are."""

        def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
            match = super().match_prefix(params)
            params.req.recurrent_cow_src_index = None
            return match

    world = SchedulerWorld(num_pages=64, states=8, interval=16, tree=Forgetful)
    world.submit("a", prompt := random_tokens(rng, 40), 4)
    world.run()
    world.submit("b", prompt, 4)
    with pytest.raises(
        SchedulerFault, match="b: no state of its first 32 tokens; its slot has con"
    ):
        world.run()
