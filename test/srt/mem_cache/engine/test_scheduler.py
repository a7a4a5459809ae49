"""The scheduler over a fake model of each kind: right tokens whatever happens, and nothing held at the end."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from engine_fakes import expected_output
from model_kinds import KINDS, both_loops, kinds
from null_tree import NullTree
from page_tree import PageTree
from scheduler_traffic import STEM_TOKENS, random_stems, random_tokens, run_random_traffic
from scheduler_world import SchedulerWorld, radix_tree

from sgl_jax.srt.mem_cache.hicache.types import TierTokens
from sgl_jax_hicache.engine.forward_batch import ForwardMode, SamplingParams
from sgl_jax_hicache.engine.outputs import FinishKind
from sgl_jax_hicache.engine.scheduler import SchedulerFault
from sgl_jax_hicache.engine.stop_strings import StopStringMatcher
from sgl_jax_hicache.engine.tokenizer import byte_tokenizer


@both_loops
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 4, 15, 16, 17, 61])
def test_one_request_gets_the_tokens_of_a_run_without_cache(
    overlap: bool, page_size: int, length: int, rng: np.random.Generator
) -> None:
    world = SchedulerWorld(overlap=overlap, page_size=page_size, num_pages=128 // page_size)
    prompt = random_tokens(rng, length)
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
    short, long = random_tokens(rng, 5), random_tokens(rng, 50)
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
    prompts = [random_tokens(rng, 8) for _ in range(6)]
    clients = [world.submit(str(i), prompt, 24) for i, prompt in enumerate(prompts)]
    world.run()
    for prompt, client in zip(prompts, clients, strict=True):
        assert client.tokens == expected_output(prompt, 24)
    assert sum(client.last.stats.num_retractions for client in clients) > 0
    assert clients[0].last.stats.num_retractions == 0, "the oldest request is never retracted"


@both_loops
def test_full_reserve_never_retracts(overlap: bool, rng: np.random.Generator) -> None:
    world = SchedulerWorld(overlap=overlap, num_pages=12, rows=4, reserve=1.0)
    clients = [world.submit(str(i), random_tokens(rng, 8), 24) for i in range(6)]
    world.run()
    assert sum(client.last.stats.num_retractions for client in clients) == 0


@both_loops
def test_a_request_may_fill_the_whole_pool(overlap: bool, rng: np.random.Generator) -> None:
    world = SchedulerWorld(overlap=overlap, num_pages=8, rows=2)
    prompt = random_tokens(rng, 20)
    client = world.submit("a", prompt, 13)  # 20 + 13 - 1 = 32 slots
    world.run()
    assert client.tokens == expected_output(prompt, 13)


@both_loops
def test_a_request_that_can_never_fit_ends_with_an_error(
    overlap: bool, rng: np.random.Generator
) -> None:
    world = SchedulerWorld(overlap=overlap, num_pages=4)
    client = world.submit("a", random_tokens(rng, 40), 2)
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
@kinds
@pytest.mark.parametrize("after_steps", range(0, 24, 3))
def test_abort_at_any_moment_frees_everything(
    overlap: bool, kind: str, after_steps: int, rng: np.random.Generator
) -> None:
    world = SchedulerWorld(num_pages=64, chunk=8, rows=1, overlap=overlap, **KINDS[kind])
    victim = world.submit("victim", random_tokens(rng, 45), 20)
    waiting = world.submit("waiting", other := random_tokens(rng, 6), 4)
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
    assert waiting.tokens == expected_output(other, 4)


def test_abort_while_waiting(rng: np.random.Generator) -> None:
    world = SchedulerWorld(rows=1)
    world.submit("running", random_tokens(rng, 6), 4)
    world.step()
    client = world.submit("waiting", random_tokens(rng, 6), 4)
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
        world.submit(str(i), random_tokens(rng, 8), 24)
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


def test_a_leak_of_each_kind_is_found_when_idle() -> None:
    world = SchedulerWorld(num_pages=64, tree=PageTree, **KINDS["both"])
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


def test_the_state_names_every_pool() -> None:
    world = SchedulerWorld(num_pages=64, tree=PageTree, **KINDS["both"])
    state = world.scheduler.state()
    assert state["pool_tokens"] == state["free_tokens"] == 256
    assert state["swa"]["pool_tokens"] == state["swa"]["free_tokens"] == 80
    assert state["states"]["pool_states"] == state["states"]["free_states"] == 4 * 3 + 6


def test_a_rid_is_unique_among_unfinished_requests() -> None:
    world = SchedulerWorld()
    world.submit("a", [1], 1)
    with pytest.raises(ValueError, match="in use"):
        world.submit("a", [2], 1)
    world.run()
    world.submit("a", [3], 1)
    world.run()


@both_loops
def test_a_shared_prefix_is_computed_once(overlap: bool, rng: np.random.Generator) -> None:
    world = SchedulerWorld(overlap=overlap, chunk=64)
    prefix = random_tokens(rng, 32)
    first = world.submit("first", [*prefix, 1, 2], 4)
    world.step()  # its pages are the cache's as soon as their forward is dispatched
    second = world.submit("second", [*prefix, 3, 4], 4)
    other = world.submit("other", [*prefix, 3, 4], 4, extra_key="another tenant")
    world.run()
    assert first.tokens == expected_output([*prefix, 1, 2], 4)
    assert second.tokens == other.tokens == expected_output([*prefix, 3, 4], 4)
    assert second.last.stats.tiers == TierTokens(device=32, computed=2)
    assert other.last.stats.tiers == TierTokens(computed=34)


@kinds
def test_flush_forgets_the_cache_and_refuses_while_busy(
    kind: str, rng: np.random.Generator
) -> None:
    world = SchedulerWorld(num_pages=64, **KINDS[kind])
    prompt = random_tokens(rng, 40)
    world.submit("a", prompt, 2)
    world.step()
    with pytest.raises(SchedulerFault, match="unfinished"):
        world.scheduler.flush()
    world.run()
    assert world.tree.evictable_size() > 0
    assert (world.tree.recurrent_evictable_size() > 0) == ("states" in KINDS[kind])
    world.scheduler.flush()
    state = world.scheduler.state()
    assert state["free_tokens"] == state["pool_tokens"]
    if "window" in KINDS[kind]:
        assert world.allocator.swa_available_size() == world.allocator.size_swa
        assert not world.allocator.full_to_swa_index_mapping.any()
    assert world.rows.recurrent_available_size() == world.rows.slots_per_rank
    again = world.submit("b", prompt, 2)
    world.run()
    assert again.last.stats.tiers == TierTokens(computed=40)
    assert again.tokens == world.clients["a"].tokens


@both_loops
@kinds
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("tree", [NullTree, PageTree, radix_tree], ids=["null", "plain", "radix"])
def test_random_traffic(
    overlap: bool, kind: str, tree: Any, page_size: int, rng: np.random.Generator
) -> None:
    sizes = dict(KINDS[kind])
    if "swa_pages" in sizes:
        sizes["swa_pages"] = sizes["swa_pages"] * 4 // page_size
    world = SchedulerWorld(
        num_pages=120 // page_size,
        page_size=page_size,
        chunk=12,
        reserve=0.1,
        tree=tree,
        overlap=overlap,
        **sizes,
    )
    stems = random_stems(rng, 3)
    run_random_traffic(world, rng, stems, num_requests=40)
    world.serve("a stem", [*stems[0], 0])
    reused = 0 if tree is NullTree else STEM_TOKENS
    assert world.serve("the stem again", [*stems[0], 1]).device == reused
