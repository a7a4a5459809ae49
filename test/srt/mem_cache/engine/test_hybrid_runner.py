"""Decoders with sliding-window and recurrent layers: against a dense one, and against themselves over chunkings."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from dense_reference import dense_logprobs
from runner_harness import Harness, Request, all_logprobs

from sgl_jax_hicache.engine.forward_batch import ForwardBatch, ForwardMode, StateSlots, SWASlots
from sgl_jax_hicache.engine.layer_kinds import RecurrentDims
from sgl_jax_hicache.engine.memory_pool import RecurrentStatePool
from sgl_jax_hicache.engine.model_runner import ModelRunner
from sgl_jax_hicache.engine.state_copies import copy_states
from sgl_jax_hicache.engine.swa_kv_pool import SWAKVPool, build_kv_pool
from sgl_jax_hicache.engine.weights import load_model
from sgl_jax_hicache.engine.weights.random_weights import RandomTensors

SEED, VOCAB, WINDOW = 5, 300, 40
TILES = (32, 64)
SLIDING = ("tiny-swa", "tiny-swa-only")
RECURRENT = ("tiny-recurrent", "tiny-hybrid")
model = cache(lambda name: load_model(f"random:{name}:{SEED}"))


def harness(name: str, **settings: Any) -> Harness:
    loaded = model(name)
    return Harness(loaded.config, loaded.params, **{"tiles": TILES, **settings})


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 256, length)]


def prefill(h: Harness, request: Request, ids: list[int], cuts: tuple[int, ...]) -> Any:
    """Log probabilities after the last of the chunks that end at `cuts` and at the end."""
    for start, stop in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        out = h.extend(request, ids[start:stop], top_logprobs_num=VOCAB)
    return all_logprobs(out, 0)


@pytest.mark.parametrize("name", SLIDING + RECURRENT)
def test_prefill_and_decode_match_the_dense_reference(name: str) -> None:
    h, config, ids = harness(name), model(name).config, prompt(150)
    request = h.new(200, idx=2)
    outputs = [h.extend(request, ids, top_logprobs_num=VOCAB)]
    outputs += [h.decode([request], top_logprobs_num=VOCAB) for _ in range(4)]
    tokens = [int(o.next_token_ids[0]) for o in outputs]
    want = dense_logprobs(config, RandomTensors(config, SEED), ids + tokens)[len(ids) - 1 : -1]
    got = np.stack([all_logprobs(o, 0) for o in outputs])
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-5)
    assert tokens == [int(t) for t in want.argmax(-1)]


@pytest.mark.parametrize("name", SLIDING + RECURRENT)
def test_nothing_depends_on_where_a_prompt_is_cut(name: str) -> None:
    """At page borders and between them; a state is complete at borders only, so the prompt ends at one."""
    ids, seen = prompt(160), []
    for cuts in ((), (16,), (64, 128), (48, 80, 96), (33, 66, 99), (1, 2, 149)):
        h = harness(name)
        request = h.new(160, idx=1)
        logprobs = prefill(h, request, ids, cuts)
        states = h.state(request) if name in RECURRENT else []
        seen.append([logprobs, *h.kv(request, 0, len(ids)), *states])
    for other in seen[1:]:
        for mine, first in zip(other, seen[0], strict=True):
            np.testing.assert_array_equal(mine, first)


def test_cuts_at_odd_page_borders_change_nothing_either() -> None:
    ids, states = prompt(40), []
    for cuts in ((), (12, 20)):
        h = harness("tiny-recurrent", page_size=4, tiles=(32,))
        request = h.new(48, idx=0)
        prefill(h, request, ids, cuts)
        states.append(h.state(request))
    for mine, other in zip(*states, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize(
    ("name", "page_size"), [*((name, 16) for name in SLIDING + RECURRENT), ("tiny-recurrent", 1)]
)
def test_decode_writes_what_prefill_writes(name: str, page_size: int) -> None:
    """Bit for bit, from inside a chunk over several page borders to one, where the state is complete."""
    h = harness(name, page_size=page_size)
    decoded, prefilled = h.new(120, idx=0), h.new(120, idx=1)
    sampled = h.generate(prompt(70), 27, decoded)
    assert decoded.length == 96
    h.extend(prefilled, prompt(70) + sampled[:-1])
    mine, other = h.kv(decoded, 0, 96), h.kv(prefilled, 0, 96)
    if name in RECURRENT:
        mine, other = mine + h.state(decoded), other + h.state(prefilled)
    for a, b in zip(mine, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["tiny-swa", "tiny-hybrid"])
def test_a_request_does_not_depend_on_its_neighbours(name: str) -> None:
    lengths = [40, 130, 5]
    h = harness(name)
    alone = [h.generate(prompt(n, n), 8, h.new(n + 8, idx=0)) for n in lengths]
    requests = [h.new(n + 8, idx=i) for i, n in enumerate(lengths)]
    items = tuple(h.item(r, prompt(n, n)) for r, n in zip(requests, lengths, strict=True))
    outputs = [h.runner.dispatch(ForwardBatch(ForwardMode.EXTEND, items))]
    outputs += [h.decode(requests) for _ in range(7)]
    together = np.stack([np.array(o.next_token_ids) for o in outputs])[:, : len(lengths)].T
    assert together.tolist() == alone


@pytest.mark.parametrize("name", SLIDING)
@pytest.mark.parametrize("decodes", [False, True])
def test_a_sliding_layer_reads_its_window_only(name: str, decodes: bool) -> None:
    """Pages before the window hold NaN, which any use would spread; the page the window starts in is whole."""
    ids, results = prompt(700), []
    for poisoned in (False, True):
        h = harness(name)
        request = h.new(720, idx=0)
        out = h.extend(request, ids[:640], top_logprobs_num=VOCAB)
        if poisoned:
            dead = request.pages[: (640 - WINDOW + 1) // h.page_size]
            assert isinstance(h.pool, SWAKVPool)
            buffers = h.pool.swa_kv_pool.kv_buffer
            buffers[:] = [buffer.at[h.swa_page_of[dead]].set(jnp.nan) for buffer in buffers]
        if decodes:
            out = h.decode([request], top_logprobs_num=VOCAB)
        else:
            out = h.extend(request, ids[640:], top_logprobs_num=VOCAB)
        results.append(all_logprobs(out, 0))
    assert np.isfinite(results[0]).all()
    np.testing.assert_array_equal(results[1], results[0])


def test_a_sliding_layer_reads_its_whole_window() -> None:
    """Through three layers a token reaches back 3 * (WINDOW - 1) tokens, and not one further."""
    h, ids = harness("tiny-swa-only"), prompt(150)
    reach = 3 * (WINDOW - 1)
    want = prefill(h, h.new(160, idx=0), ids, ())
    for age, changes in ((reach + 1, False), (reach, True), (WINDOW - 1, True)):
        other = list(ids)
        other[-1 - age] = (other[-1 - age] + 1) % 256
        got = prefill(h, h.new(160, idx=1), other, ())
        assert np.any(got != want) == changes, age


@pytest.mark.parametrize("name", RECURRENT)
def test_a_continuation_depends_on_the_state(name: str) -> None:
    h, ids = harness(name), prompt(70)
    pool = h.runner.recurrent_pool
    assert pool is not None
    kept = h.generate(ids, 16, h.new(100, idx=0))
    for buffers in (pool.recurrent_buffers, [layer[0] for layer in pool.conv_buffers]):
        assert all(np.any(np.array(buffer[h.state_slot(h.new(0, 0))])) for buffer in buffers)
    request = h.new(100, idx=1)
    outputs = [h.extend(request, ids)]
    pool.clear()
    outputs += [h.decode([request]) for _ in range(15)]
    assert [int(o.next_token_ids[0]) for o in outputs] != kept


@pytest.mark.parametrize("name", RECURRENT)
def test_continuations_depend_on_the_first_token(name: str) -> None:
    h = harness(name, size=4096)
    changed = 0
    for seed in range(8):
        ids = prompt(80, seed)
        other = [(ids[0] + 1) % 256, *ids[1:]]
        changed += h.generate(ids, 16) != h.generate(other, 16)
    assert changed >= 6


def test_a_slot_is_taken_over_without_a_trace() -> None:
    h = harness("tiny-hybrid")
    pool = h.runner.recurrent_pool
    assert pool is not None
    fresh = h.generate(prompt(50), 8, h.new(60, idx=1))
    for index in range(pool.layer_num):
        pool.recurrent_buffers[index] = jnp.full_like(pool.recurrent_buffers[index], jnp.nan)
        pool.conv_buffers[index][0] = jnp.full_like(pool.conv_buffers[index][0], jnp.nan)
    assert h.generate(prompt(50), 8, h.new(60, idx=1)) == fresh


def test_a_step_touches_its_own_slot_and_the_dummy_only() -> None:
    h = harness("tiny-hybrid")
    other, request = h.new(64, idx=0), h.new(64, idx=1)
    h.extend(other, prompt(33, seed=3))
    before = h.state(other)
    h.extend(request, prompt(20))
    h.decode([request])
    for mine, old in zip(h.state(other), before, strict=True):
        np.testing.assert_array_equal(mine, old)
    assert all(np.isfinite(state).all() for state in h.state(request))


def test_state_buffers_are_donated_and_rebound() -> None:
    h = harness("tiny-hybrid")
    pool, request = h.runner.recurrent_pool, h.new(64, idx=0)
    assert pool is not None
    h.extend(request, prompt(20))
    for _ in range(2):
        old = [*pool.recurrent_buffers, *(layer[0] for layer in pool.conv_buffers)]
        addresses = [buffer.unsafe_buffer_pointer() for buffer in old]
        h.decode([request])
        assert all(buffer.is_deleted() for buffer in old)
        new = [*pool.recurrent_buffers, *(layer[0] for layer in pool.conv_buffers)]
        assert [buffer.unsafe_buffer_pointer() for buffer in new] == addresses


@pytest.mark.parametrize("decodes", [False, True])
def test_a_tracked_state_is_the_state_at_its_border(decodes: bool) -> None:
    h = harness("tiny-hybrid")
    request, other = h.new(64, idx=1), h.new(64, idx=0)
    h.extend(other, prompt(20, seed=8))
    if decodes:
        h.extend(request, prompt(31))
        items = (h.item(request, None, track=5), h.item(other, None, track=6))
        h.runner.dispatch(ForwardBatch(ForwardMode.DECODE, items))
    else:
        h.extend(request, prompt(32), track=5)
    want = h.state(request)
    for mine, kept in zip(want, h.state_at(5), strict=True):
        assert kept.any()
        np.testing.assert_array_equal(kept, mine)
    for mine, kept in zip(h.state(other), h.state_at(6), strict=True):
        assert kept.any() == decodes
        assert not decodes or np.array_equal(mine, kept)
    h.decode([request])
    for mine, kept in zip(want, h.state_at(5), strict=True):
        np.testing.assert_array_equal(kept, mine)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_request_that_starts_from_a_copy_goes_on_as_the_first_did(name: str) -> None:
    """Two requests behind one prefix of 64 tokens, in one step: pages shared, states copied from one tracked slot."""
    h, stem, tails = harness(name), prompt(64), [prompt(33, seed=1), prompt(7, seed=2)]
    first = h.new(120, idx=0)
    h.extend(first, stem, track=5, wants_token=False)
    h.extend(first, tails[0])  # its running slot moves on
    want = []
    for tail in tails:
        alone = harness(name)
        request = alone.new(120, idx=0)
        alone.extend(request, stem, wants_token=False)
        out = alone.extend(request, tail, top_logprobs_num=VOCAB)
        want.append((all_logprobs(out, 0), alone.state(request)))
    requests = [h.new(120, idx=idx) for idx in (1, 2)]
    for request in requests:
        request.pages[:4] = first.pages[:4]
        request.length = 64
    items = [
        h.item(request, tail, cow_src=5, top_logprobs_num=VOCAB)
        for request, tail in zip(requests, tails, strict=True)
    ]
    out = h.runner.dispatch(ForwardBatch(ForwardMode.EXTEND, tuple(items)))
    for row, request in enumerate(requests):
        np.testing.assert_array_equal(all_logprobs(out, row), want[row][0])
        for mine, other in zip(h.state(request), want[row][1], strict=True):
            np.testing.assert_array_equal(mine, other)


def test_copies_are_made_in_place_and_change_no_other_slot() -> None:
    pool = RecurrentStatePool(6, RecurrentDims(4, 2, 8, 12, 4), layer_num=2)
    fill = np.random.default_rng(3)

    def buffers() -> list[Any]:
        return [*pool.recurrent_buffers, *(layer[0] for layer in pool.conv_buffers)]

    for index in range(2):
        shape = pool.recurrent_shape
        pool.recurrent_buffers[index] = jnp.asarray(fill.standard_normal(shape, np.float32))
        pool.conv_buffers[index][0] = jnp.asarray(fill.standard_normal(pool.conv_shape, np.float32))
    before, old = [np.array(buffer) for buffer in buffers()], buffers()
    addresses = [buffer.unsafe_buffer_pointer() for buffer in old]
    copy_states(pool, [(2, 5), (5, 1), (3, 4)], width=8)
    assert all(buffer.is_deleted() for buffer in old)
    assert [buffer.unsafe_buffer_pointer() for buffer in buffers()] == addresses
    for was, buffer in zip(before, buffers(), strict=True):
        want = was.copy()
        want[[5, 1, 4]] = was[[2, 5, 3]]  # every source as it was before
        np.testing.assert_array_equal(np.array(buffer), want)


def test_runners_that_cannot_work_are_refused() -> None:
    loaded = model("tiny-hybrid")
    kv_pool = build_kv_pool(loaded.config, size=64, swa_size=64, page_size=16)
    with pytest.raises(ValueError, match="needs a pool of states"):
        ModelRunner(
            loaded.config, loaded.params, kv_pool, max_running_requests=2, max_context_len=64
        )
    with pytest.raises(ValueError, match="multiples of 16"):
        harness("tiny-hybrid", tiles=(8, 32))
    h = harness("tiny-hybrid", max_running_requests=2)
    item = h.item(h.new(32, idx=0), prompt(4))
    for states in (StateSlots(running=7), StateSlots(1, cow_src=7), StateSlots(1, track=-1)):
        with pytest.raises(ValueError, match=r"recurrent slot (7|-1) outside \[0, 6\]"):
            h.runner.dispatch(ForwardBatch(ForwardMode.EXTEND, (replace(item, states=states),)))
    for swa in (None, SWASlots(item.out_slots[1:], item.page_table)):
        with pytest.raises(ValueError, match="its SWA slots do not go with its slots"):
            h.runner.dispatch(ForwardBatch(ForwardMode.EXTEND, (replace(item, swa=swa),)))
