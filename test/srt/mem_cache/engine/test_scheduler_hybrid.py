"""The scheduler with pools for sliding windows and recurrent states: right tokens, room in each pool, nothing held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_fakes import VOCAB_SIZE, expected_output
from null_tree import NullTree
from page_tree import PageTree
from scheduler_world import HybridWorld, radix_tree

from sgl_jax.srt.mem_cache.hicache.tree_types import MatchPrefixParams, MatchResult
from sgl_jax_hicache.engine.fault import SchedulerFault
from sgl_jax_hicache.engine.forward_batch import ForwardMode
from sgl_jax_hicache.engine.outputs import FinishKind

both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
trees = pytest.mark.parametrize(
    "tree", [NullTree, PageTree, radix_tree], ids=["null", "plain", "radix"]
)
reusing = pytest.mark.parametrize("tree", [PageTree, radix_tree], ids=["plain", "radix"])
KINDS: dict[str, dict[str, Any]] = {
    "sliding": {"window": 10, "swa_pages": 20},
    "recurrent": {"states": 6, "interval": 8},
    "both": {"window": 7, "swa_pages": 16, "states": 6, "interval": 16},
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def _prompt(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(0, VOCAB_SIZE, length).tolist()


def _swa_in_use(world: HybridWorld) -> int:
    return world.allocator.size_swa - world.allocator.swa_available_size()


@both_loops
@trees
@pytest.mark.parametrize("window", [1, 3, 4, 5, 10, 64])
def test_pages_before_the_window_are_freed_and_nobody_misses_them(
    overlap: bool, tree: Any, window: int, rng: np.random.Generator
) -> None:
    world = HybridWorld(
        num_pages=64, window=window, swa_pages=48, tree=tree, overlap=overlap, chunk=16
    )
    prompt = _prompt(rng, 50)
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
    world = HybridWorld(num_pages=64, window=10, swa_pages=10, tree=tree, overlap=overlap, rows=2)
    prompt = _prompt(rng, 200)
    client = world.submit("a", prompt, 57)  # 256 slots, the whole pool
    world.run()
    assert client.tokens == expected_output(prompt, 57)
    assert client.last.stats.num_retractions == 0


@both_loops
@trees
def test_a_small_swa_pool_serves_many_requests_in_turn(
    overlap: bool, tree: Any, rng: np.random.Generator
) -> None:
    world = HybridWorld(
        num_pages=256, window=10, swa_pages=14, tree=tree, overlap=overlap, reserve=0.0
    )
    prompts = [_prompt(rng, int(n)) for n in rng.integers(1, 80, 8)]
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
    world = HybridWorld(
        num_pages=256, window=10, swa_pages=24, tree=tree, overlap=overlap, reserve=1.0
    )
    clients = [world.submit(str(i), _prompt(rng, 30), 30) for i in range(6)]
    world.run()
    assert sum(client.last.stats.num_retractions for client in clients) == 0
    assert max(len(batch.items) for batch in world.runner.batches) > 1


@both_loops
def test_states_that_the_tree_keeps_make_way_for_requests(
    overlap: bool, rng: np.random.Generator
) -> None:
    world = HybridWorld(num_pages=256, states=4, interval=4, rows=2, tree=PageTree, overlap=overlap)
    world.submit("alone", _prompt(rng, 60), 2)
    world.run()
    assert world.rows.recurrent_available_size() < 2 * world.rows.request_owned_slots
    clients = [world.submit(str(i), prompt := _prompt(rng, 30), 4) for i in range(2)]
    world.run()
    assert len(world.runner.batches[-1].items) == 2
    assert clients[1].tokens == expected_output(prompt, 4)


def _optimist(world: Callable[[], HybridWorld]) -> type[NullTree]:
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
    world = HybridWorld(
        num_pages=5, states=0, interval=8, tree=_optimist(lambda: world), overlap=overlap
    )
    prompts = [_prompt(rng, 20), _prompt(rng, 12)]
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

    world = HybridWorld(
        num_pages=20,
        window=200,
        swa_pages=20,
        states=0,
        interval=8,
        tree=_optimist(lambda: world),
        overlap=overlap,
    )
    prompts = [_prompt(rng, 60), _prompt(rng, 50)]
    clients = [world.submit(str(i), prompt, 4) for i, prompt in enumerate(prompts)]
    world.step()
    assert [item.rid for item in world.runner.batches[0].items] == ["0", "1"]
    world.run()
    for prompt, client in zip(prompts, clients, strict=True):
        assert client.tokens == expected_output(prompt, 4)
    assert [client.last.stats.num_retractions > 0 for client in clients] == [False, True]


@both_loops
def test_a_request_for_which_nothing_can_make_room_ends_with_an_error(
    overlap: bool, rng: np.random.Generator
) -> None:
    class Stingy(NullTree):
        """Keeps every SWA page until the request ends."""

        def evict_req_swa(self, req: Any, pre_len: int, dp_rank: int = 0) -> None:
            pass

    world = HybridWorld(num_pages=64, window=10, swa_pages=12, tree=Stingy, overlap=overlap)
    clients = [world.submit("prefill", _prompt(rng, 100), 4), world.submit("decode", [1, 2], 100)]
    world.run()
    for client in clients:
        assert client.last.finish is not None
        assert client.last.finish.kind is FinishKind.ERROR
        assert client.last.finish.message == "the device pools have no room left for this request"


@both_loops
@pytest.mark.parametrize("interval", [4, 8, 12])
def test_states_are_tracked_at_every_border_and_nowhere_else(
    overlap: bool, interval: int, rng: np.random.Generator
) -> None:
    world = HybridWorld(num_pages=64, states=0, interval=interval, tree=NullTree, overlap=overlap)
    prompt = _prompt(rng, 45)
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
    world = HybridWorld(num_pages=64, states=8, interval=16, tree=tree, overlap=overlap)
    stem = _prompt(rng, 40)
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

    world = HybridWorld(num_pages=64, states=8, interval=16, tree=Forgetful)
    world.submit("a", prompt := _prompt(rng, 40), 4)
    world.run()
    world.submit("b", prompt, 4)
    with pytest.raises(
        SchedulerFault, match="b: no state of its first 32 tokens; its slot has con"
    ):
        world.run()


def test_a_window_that_is_not_there_is_a_fault(rng: np.random.Generator) -> None:
    class Eager(NullTree):
        """Frees a page too many."""

        def evict_req_swa(self, req: Any, pre_len: int, dp_rank: int = 0) -> None:
            super().evict_req_swa(req, pre_len + self.page_size, dp_rank)

    world = HybridWorld(num_pages=64, window=10, swa_pages=32, tree=Eager)
    world.submit("a", _prompt(rng, 20), 20)
    with pytest.raises(SchedulerFault, match=r"the window before token \d+ is not in the SWA pool"):
        world.run()


def test_a_leak_of_each_kind_is_found_when_idle() -> None:
    world = HybridWorld(num_pages=64, tree=PageTree, **KINDS["both"])
    world.submit("a", list(range(33)), 2)
    world.run()
    world.rows.alloc_recurrent_slot()
    slots = world.allocator.alloc(4)
    with pytest.raises(SchedulerFault) as caught:
        world.scheduler.check_idle()
    message = str(caught.value)
    assert "full: free" in message
    assert "; swa: free" in message
    assert "; states: free" in message
    world.allocator.free_swa(slots)
    with pytest.raises(SchedulerFault, match="full: free") as caught:
        world.scheduler.check_idle()
    assert "swa" not in str(caught.value)


def test_a_flush_takes_back_every_kind(rng: np.random.Generator) -> None:
    world = HybridWorld(num_pages=64, tree=PageTree, **KINDS["both"])
    world.submit("a", prompt := _prompt(rng, 40), 4)
    world.run()
    assert world.tree.recurrent_evictable_size() > 0
    world.scheduler.flush()
    assert world.allocator.full_available_size() == world.allocator.size
    assert world.allocator.swa_available_size() == world.allocator.size_swa
    assert not world.allocator.full_to_swa_index_mapping.any()
    assert world.rows.recurrent_available_size() == world.rows.slots_per_rank
    world.submit("b", prompt, 4)
    world.run()
    assert world.clients["b"].last.stats.tiers.computed == 40
    assert world.clients["b"].tokens == world.clients["a"].tokens


def test_the_state_names_every_pool() -> None:
    world = HybridWorld(num_pages=64, tree=PageTree, **KINDS["both"])
    state = world.scheduler.state()
    assert state["pool_tokens"] == state["free_tokens"] == 256
    assert state["swa"]["pool_tokens"] == state["swa"]["free_tokens"] == 64
    assert state["states"]["pool_states"] == state["states"]["free_states"] == 4 * 3 + 6


@both_loops
@kinds
@pytest.mark.parametrize("after_steps", range(0, 24, 3))
def test_abort_at_any_moment_frees_every_kind(
    overlap: bool, kind: dict[str, Any], after_steps: int, rng: np.random.Generator
) -> None:
    world = HybridWorld(num_pages=64, tree=PageTree, overlap=overlap, rows=1, **kind)
    world.submit("victim", _prompt(rng, 45), 20)
    waiting = world.submit("waiting", other := _prompt(rng, 6), 4)
    world.step(after_steps)
    assert world.scheduler.abort("victim")
    assert world.rows.available_size() == 1
    world.run()
    assert waiting.tokens == expected_output(other, 4)


@both_loops
@kinds
@trees
@pytest.mark.parametrize("page_size", [1, 4])
def test_random_traffic(
    overlap: bool, kind: dict[str, Any], tree: Any, page_size: int, rng: np.random.Generator
) -> None:
    scaled = {**kind}
    if "swa_pages" in scaled:
        scaled["swa_pages"] = scaled["swa_pages"] * 4 // page_size
    world = HybridWorld(
        num_pages=120 // page_size,
        page_size=page_size,
        chunk=12,
        reserve=0.1,
        tree=tree,
        overlap=overlap,
        **scaled,
    )
    prompts: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    stems = [_prompt(rng, 40) for _ in range(3)]
    for i in range(60):
        if rng.random() < 0.7:
            stem = stems[int(rng.integers(0, 3))][: int(rng.integers(0, 41))]
            prompt = [*stem, *_prompt(rng, int(rng.integers(1, 20)))]
            prompts[str(i)] = (prompt, int(rng.integers(1, 25)))
            world.submit(str(i), *prompts[str(i)])
        if rng.random() < 0.15 and prompts:
            rid = str(rng.choice(list(prompts)))
            if world.scheduler.abort(rid):
                aborted.add(rid)
        world.step(int(rng.integers(0, 6)))
        world.allocator.check_invariants()
    world.run()
    for rid, (prompt, num_new) in prompts.items():
        expected = expected_output(prompt, num_new)
        tokens = world.clients[rid].tokens
        assert tokens == (expected[: len(tokens)] if rid in aborted else expected)
    if tree is not NullTree:
        assert sum(client.last.stats.tiers.device for client in world.clients.values()) > 0
