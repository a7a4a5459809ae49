"""The scheduler over the fake runner: right tokens whatever happens, and nothing held at the end."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from engine_fakes import VOCAB_SIZE, expected_output
from null_tree import NullTree
from scheduler_world import SchedulerWorld, TreeFactory, radix_tree

from sgl_jax.srt.mem_cache.hicache.tree_types import RadixKey
from sgl_jax.srt.mem_cache.hicache.types import TierTokens
from sgl_jax_hicache.engine.forward_batch import ForwardMode, SamplingParams
from sgl_jax_hicache.engine.outputs import FinishKind
from sgl_jax_hicache.engine.scheduler import SchedulerFault
from sgl_jax_hicache.engine.stop_strings import StopStringMatcher
from sgl_jax_hicache.engine.tokenizer import byte_tokenizer

both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])


def _prompt(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(0, VOCAB_SIZE, length).tolist()


@both_loops
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 4, 15, 16, 17, 61])
def test_one_request_gets_the_tokens_of_a_run_without_cache(
    overlap: bool, page_size: int, length: int, rng: np.random.Generator
) -> None:
    world = SchedulerWorld(overlap=overlap, page_size=page_size, num_pages=128 // page_size)
    prompt = _prompt(rng, length)
    client = world.submit("a", prompt, 9)
    world.run()
    assert client.tokens == expected_output(prompt, 9)
    assert client.last.finish is not None
    assert client.last.finish.kind is FinishKind.LENGTH
    assert client.last.stats.completion_tokens == 9
    assert client.last.stats.tiers.computed == length


@both_loops
def test_a_long_prompt_is_computed_in_chunks_between_decodes(
    overlap: bool, rng: np.random.Generator
) -> None:
    world = SchedulerWorld(overlap=overlap, chunk=8, num_pages=64)
    short, long = _prompt(rng, 5), _prompt(rng, 50)
    first = world.submit("short", short, 20)
    world.step(2)
    second = world.submit("long", long, 3)
    world.run()
    assert first.tokens == expected_output(short, 20)
    assert second.tokens == expected_output(long, 3)
    extends = [b for b in world.runner.batches if b.mode is ForwardMode.EXTEND]
    assert max(sum(i.num_tokens for i in batch.items) for batch in extends) <= 8
    modes = [batch.mode for batch in world.runner.batches[2:14]]
    assert all(a is not b for a, b in itertools.pairwise(modes)), "they take turns"


@both_loops
def test_a_pool_that_is_too_small_retracts_and_still_answers_everyone(
    overlap: bool, rng: np.random.Generator
) -> None:
    world = SchedulerWorld(overlap=overlap, num_pages=12, rows=4, reserve=0.0)
    prompts = [_prompt(rng, 8) for _ in range(6)]
    clients = [world.submit(str(i), prompt, 24) for i, prompt in enumerate(prompts)]
    world.run()
    for prompt, client in zip(prompts, clients, strict=True):
        assert client.tokens == expected_output(prompt, 24)
    assert sum(client.last.stats.num_retractions for client in clients) > 0
    assert clients[0].last.stats.num_retractions == 0, "the oldest request is never retracted"


@both_loops
def test_full_reserve_never_retracts(overlap: bool, rng: np.random.Generator) -> None:
    world = SchedulerWorld(overlap=overlap, num_pages=12, rows=4, reserve=1.0)
    clients = [world.submit(str(i), _prompt(rng, 8), 24) for i in range(6)]
    world.run()
    assert sum(client.last.stats.num_retractions for client in clients) == 0


@both_loops
def test_a_request_may_fill_the_whole_pool(overlap: bool, rng: np.random.Generator) -> None:
    world = SchedulerWorld(overlap=overlap, num_pages=8, rows=2)
    prompt = _prompt(rng, 20)
    client = world.submit("a", prompt, 13)  # 20 + 13 - 1 = 32 slots
    world.run()
    assert client.tokens == expected_output(prompt, 13)


@both_loops
def test_a_request_that_can_never_fit_ends_with_an_error(
    overlap: bool, rng: np.random.Generator
) -> None:
    world = SchedulerWorld(overlap=overlap, num_pages=4)
    client = world.submit("a", _prompt(rng, 40), 2)
    other = world.submit("b", [1, 2, 3], 2)
    world.run()
    assert client.last.finish is not None
    assert client.last.finish.kind is FinishKind.ERROR
    assert "do not fit" in str(client.last.finish.message)
    assert other.tokens == expected_output([1, 2, 3], 2)


@both_loops
def test_stop_conditions(overlap: bool) -> None:
    prompt = [5, 6, 7]
    output = expected_output(prompt, 12)
    eos, stop_id = frozenset({output[4]}), output[2]

    text_stop = byte_tokenizer(300).decode(output[:7])[-2:]
    world = SchedulerWorld(overlap=overlap, rows=8)
    by_eos = world.submit("eos", prompt, 12, eos_token_ids=eos)
    ignored = world.submit(
        "ignored",
        prompt,
        eos_token_ids=eos,
        sampling=SamplingParams(max_new_tokens=12, ignore_eos=True),
    )
    by_id = world.submit(
        "id", prompt, sampling=SamplingParams(max_new_tokens=12, stop_token_ids=(stop_id,))
    )
    by_text = world.submit(
        "text", prompt, 12, stop_matcher=StopStringMatcher(byte_tokenizer(300), [text_stop])
    )
    world.run()
    assert by_eos.tokens == output[: output.index(output[4]) + 1]
    assert by_eos.last.finish is not None
    assert (by_eos.last.finish.kind, by_eos.last.finish.matched) == (FinishKind.STOP, output[4])
    assert ignored.tokens == output
    assert by_id.tokens == output[: output.index(stop_id) + 1]
    assert by_text.tokens == output[:7]
    assert by_text.last.finish is not None
    assert by_text.last.finish.matched == text_stop


@both_loops
def test_log_probabilities_follow_their_tokens(overlap: bool) -> None:
    world = SchedulerWorld(overlap=overlap)
    client = world.submit("a", [1, 2], 5, return_logprob=True, top_logprobs_num=3, stream=False)
    plain = world.submit("b", [3, 4], 5)
    world.run()
    assert len(client.chunks) == 1, "without stream everything comes at the end"
    logprobs = client.last.logprobs
    assert [entry.token_id for entry in logprobs] == client.tokens
    assert [entry.logprob for entry in logprobs] == pytest.approx([-t / 100 for t in client.tokens])
    assert all(len(entry.top) == 3 for entry in logprobs)
    assert all(chunk.logprobs == () for chunk in plain.chunks)
    assert len(plain.chunks) == 5


@both_loops
@pytest.mark.parametrize("after_steps", range(9))
def test_abort_at_any_moment_frees_everything(
    overlap: bool, after_steps: int, rng: np.random.Generator
) -> None:
    world = SchedulerWorld(overlap=overlap, chunk=8, rows=1)
    victim = world.submit("victim", _prompt(rng, 30), 8)
    waiting = world.submit("waiting", _prompt(rng, 6), 4)
    world.step(after_steps)
    assert world.scheduler.abort("victim")
    assert world.held_tokens() == 0
    assert world.rows.available_size() == 1
    assert not world.scheduler.abort("victim")
    assert victim.last.finish is not None
    assert victim.last.finish.kind is FinishKind.ABORT
    num_chunks = len(victim.chunks)
    world.run()
    assert len(victim.chunks) == num_chunks, "nothing comes after the last chunk"
    assert waiting.last.stats.completion_tokens == 4


def test_abort_while_waiting(rng: np.random.Generator) -> None:
    world = SchedulerWorld(rows=1)
    world.submit("running", _prompt(rng, 6), 4)
    world.step()
    client = world.submit("waiting", _prompt(rng, 6), 4)
    assert world.scheduler.abort("waiting")
    assert client.tokens == []
    world.run()


def test_overlap_dispatches_the_next_step_before_it_reads_the_last() -> None:
    world = SchedulerWorld(overlap=True)
    client = world.submit("a", [1, 2, 3], 4)
    world.step()
    assert (len(world.runner.batches), client.tokens) == (1, [])
    world.step()
    assert (len(world.runner.batches), len(client.tokens)) == (2, 1)
    world.run()
    assert len(world.runner.batches) == 4, "no step is dispatched for tokens nobody may have"


def test_index_arrays_of_a_dispatched_step_never_change(rng: np.random.Generator) -> None:
    world = SchedulerWorld(num_pages=12, reserve=0.0)
    for i in range(6):
        world.submit(str(i), _prompt(rng, 8), 24)
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def remember(batch: object) -> None:
        for item in batch.items:  # type: ignore[attr-defined]
            for array in (item.out_slots, item.page_table, item.token_ids):
                if array is not None:
                    seen.append((array, array.copy()))

    world.runner.on_dispatch = remember
    world.run()
    assert len(seen) > 100
    assert all(np.array_equal(array, copy) for array, copy in seen)


def test_a_leak_is_found_when_idle() -> None:
    world = SchedulerWorld()
    world.submit("a", [1, 2, 3], 2)
    world.run()
    world.allocator.alloc(4)
    with pytest.raises(SchedulerFault, match=r"free 120 \+ evictable 4 \+ protected 0 != pool 128"):
        world.scheduler.check_idle()


def test_a_rid_is_unique_among_unfinished_requests() -> None:
    world = SchedulerWorld()
    world.submit("a", [1], 1)
    with pytest.raises(ValueError, match="in use"):
        world.submit("a", [2], 1)
    world.run()
    world.submit("a", [3], 1)
    world.run()


class SlowStorageTree(NullTree):
    """Prefetches become ready when the test says so; everything is recorded."""

    hicache_enabled = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ready: set[str] = set()
        self.started: list[str] = []
        self.released: list[str] = []
        self.admitted: list[str] = []
        self.asked: list[str] = []

    def start_prefetch(self, rid: str, key: RadixKey) -> None:
        self.started.append(rid)

    def prefetch_ready(self, rid: str) -> bool:
        self.asked.append(rid)
        return rid in self.ready

    def release_prefetch(self, rid: str) -> None:
        self.released.append(rid)

    def has_pending_work(self) -> bool:
        return bool(set(self.started) - self.ready - set(self.released))

    def tier_tokens(
        self, rid: str, prompt_len: int, device_len: int, prefix_len: int
    ) -> TierTokens:
        self.admitted.append(rid)
        return super().tier_tokens(rid, prompt_len, device_len, prefix_len)


@both_loops
def test_a_request_that_waits_for_storage_lets_others_pass(overlap: bool) -> None:
    world = SchedulerWorld(overlap=overlap, tree=SlowStorageTree, rows=1)
    world.tree.ready = {"b", "c"}
    clients = {rid: world.submit(rid, [1, 2, 3], 3) for rid in ("a", "b", "c")}
    world.step(20)
    assert clients["a"].chunks == []
    assert clients["b"].tokens == clients["c"].tokens == expected_output([1, 2, 3], 3)
    world.tree.ready.add("a")
    world.run()
    assert clients["a"].tokens == expected_output([1, 2, 3], 3)
    assert world.tree.started == ["a", "b", "c"]
    assert sorted(world.tree.admitted) == ["a", "b", "c"]
    assert set(world.tree.released) == {"a", "b", "c"}


def test_a_prefetch_is_asked_for_only_when_its_request_could_be_admitted() -> None:
    world = SchedulerWorld(tree=SlowStorageTree, rows=1)
    world.tree.ready = {"a"}
    world.submit("a", [1, 2, 3], 20)
    world.submit("b", [4, 5], 1)
    world.step(5)
    assert world.tree.asked == ["a"], "the only row is taken: b's deadline must not run yet"
    world.scheduler.abort("a")
    world.scheduler.abort("b")
    world.run()
    assert set(world.tree.released) == {"a", "b"}


@both_loops
def test_tiers_are_counted_once_however_often_a_request_is_retracted(
    overlap: bool, rng: np.random.Generator
) -> None:
    world = SchedulerWorld(overlap=overlap, tree=SlowStorageTree, num_pages=12, rows=4, reserve=0.0)
    rids = [str(i) for i in range(6)]
    world.tree.ready = set(rids)
    for rid in rids:
        world.submit(rid, _prompt(rng, 8), 24)
    world.run()
    assert sum(client.last.stats.num_retractions for client in world.clients.values()) > 0
    assert sorted(world.tree.admitted) == rids
    assert sorted(world.tree.released) == rids


@both_loops
def test_a_shared_prefix_is_computed_once(overlap: bool, rng: np.random.Generator) -> None:
    world = SchedulerWorld(overlap=overlap, chunk=64)
    prefix = _prompt(rng, 32)
    first = world.submit("first", [*prefix, 1, 2], 4)
    world.step()  # its pages are the cache's as soon as their forward is dispatched
    second = world.submit("second", [*prefix, 3, 4], 4)
    other = world.submit("other", [*prefix, 3, 4], 4, extra_key="another tenant")
    world.run()
    assert first.tokens == expected_output([*prefix, 1, 2], 4)
    assert second.tokens == other.tokens == expected_output([*prefix, 3, 4], 4)
    assert second.last.stats.tiers == TierTokens(device=32, computed=2)
    assert other.last.stats.tiers == TierTokens(computed=34)


def test_flush_forgets_the_cache_and_refuses_while_busy() -> None:
    world = SchedulerWorld()
    world.submit("a", list(range(20)), 2)
    world.step()
    with pytest.raises(SchedulerFault, match="unfinished"):
        world.scheduler.flush()
    world.run()
    assert world.tree.evictable_size() > 0
    world.scheduler.flush()
    assert world.allocator.available_size() == world.allocator.size
    again = world.submit("b", list(range(20)), 2)
    world.run()
    assert again.last.stats.tiers == TierTokens(computed=20)
    assert again.tokens == world.clients["a"].tokens


@both_loops
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("tree", [radix_tree, NullTree], ids=["radix", "null"])
def test_random_traffic(
    overlap: bool, page_size: int, tree: TreeFactory, rng: np.random.Generator
) -> None:
    world = SchedulerWorld(
        overlap=overlap,
        page_size=page_size,
        num_pages=96 // page_size,
        chunk=12,
        reserve=0.1,
        tree=tree,
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
    if tree is radix_tree:
        assert sum(client.last.stats.tiers.device for client in world.clients.values()) > 0
