"""The chunked and the step form of the gated delta rule, against the rule itself token by token."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_reference import delta_recurrence

from sgl_jax_hicache.engine.layers.gated_delta import (
    DeltaInputs,
    delta_chunks,
    delta_step,
    short_conv,
)

HEADS, K_DIM, V_DIM, CHUNK, ROWS = 3, 8, 5, 16, 64

Array = np.ndarray[Any, Any]

chunks = jax.jit(partial(delta_chunks, chunk=CHUNK))
step = jax.jit(delta_step)


def inputs(channels: int, tokens: int = ROWS, decay: float = 0.3, seed: int = 0) -> DeltaInputs:
    """Random tokens with unit keys, as the layer makes them; `decay` is the mean of -log_decay."""
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((tokens, HEADS, K_DIM)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((tokens, HEADS, V_DIM))
    beta = rng.uniform(0.0, 1.0, (tokens, HEADS))
    log_decay = -decay * rng.exponential(size=(tokens, HEADS, channels))
    return DeltaInputs(*(np.asarray(a, np.float32) for a in (q, k, v, beta, log_decay)))  # type: ignore[arg-type]


def start_state(seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal((HEADS, K_DIM, V_DIM)).astype(np.float32)


def run_chunks(state: Array, x: DeltaInputs, start: int, stop: int) -> tuple[Array, Array]:
    """Tokens start .. stop-1 of x in one tile, padded with what must not count."""
    part = DeltaInputs(*(jnp.full((ROWS, *a.shape[1:]), 7.0) for a in x))
    part = DeltaInputs(
        *(p.at[: stop - start].set(a[start:stop]) for p, a in zip(part, x, strict=True))
    )
    valid = jnp.arange(ROWS) < stop - start
    end, out = chunks(jnp.asarray(state), part.masked(valid), jnp.int32(stop - start))
    return np.array(end), np.array(out)[: stop - start]


@pytest.mark.parametrize("channels", [1, K_DIM])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 50, 64])
def test_chunks_match_the_recurrence(channels: int, length: int) -> None:
    x, state = inputs(channels), start_state()
    got_state, got = run_chunks(state, x, 0, length)
    exact = (np.asarray(a[:length], np.float64) for a in x)
    want, want_state = delta_recurrence(*exact, state.astype(np.float64))
    np.testing.assert_allclose(got, want, atol=2e-5)
    np.testing.assert_allclose(got_state, want_state, atol=2e-5)


@pytest.mark.parametrize("channels", [1, K_DIM])
def test_steps_match_the_recurrence(channels: int) -> None:
    x, state = inputs(channels), start_state()
    got_state, got = jnp.asarray(state)[None], []
    for t in range(20):
        got_state, out = step(got_state, DeltaInputs(*(a[t : t + 1] for a in x)))
        got.append(np.array(out[0]))
    exact = (np.asarray(a[:20], np.float64) for a in x)
    want, want_state = delta_recurrence(*exact, state.astype(np.float64))
    np.testing.assert_allclose(np.stack(got), want, atol=2e-5)
    np.testing.assert_allclose(np.array(got_state[0]), want_state, atol=2e-5)


@pytest.mark.parametrize("channels", [1, K_DIM])
@pytest.mark.parametrize("decay", [1e-4, 5.0, 300.0])
def test_weak_and_strong_decays_stay_finite_and_exact(channels: int, decay: float) -> None:
    x, state = inputs(channels, decay=decay), start_state()
    got_state, got = run_chunks(state, x, 0, ROWS)
    exact = (np.asarray(a, np.float64) for a in x)
    want, want_state = delta_recurrence(*exact, state.astype(np.float64))
    np.testing.assert_allclose(got, want, atol=1e-4)
    np.testing.assert_allclose(got_state, want_state, atol=1e-4)


@pytest.mark.parametrize("channels", [1, K_DIM])
def test_repeated_keys_written_at_full_strength_are_solved(channels: int) -> None:
    x = inputs(channels, decay=1e-3)
    x = x._replace(k=np.broadcast_to(x.k[:1], x.k.shape), beta=np.ones_like(x.beta))
    got_state, _ = run_chunks(start_state(), x, 0, ROWS)
    exact = (np.asarray(a, np.float64) for a in x)
    _, want_state = delta_recurrence(*exact, start_state().astype(np.float64))
    np.testing.assert_allclose(got_state, want_state, atol=1e-4)


@pytest.mark.parametrize("channels", [1, K_DIM])
@pytest.mark.parametrize("cuts", [(16,), (32, 48), (16, 32, 48)])
def test_cuts_at_chunk_borders_change_nothing_bit_for_bit(
    channels: int, cuts: tuple[int, ...]
) -> None:
    x = inputs(channels)
    want_state, want = run_chunks(start_state(), x, 0, 60)
    state, outs = start_state(), []
    for start, stop in zip((0, *cuts), (*cuts, 60), strict=True):
        state, out = run_chunks(state, x, start, stop)
        outs.append(out)
    np.testing.assert_array_equal(np.concatenate(outs), want)
    np.testing.assert_array_equal(state, want_state)


def test_a_masked_step_keeps_the_state() -> None:
    x = DeltaInputs(*(a[:2] for a in inputs(1)))
    state = np.stack([start_state(1), start_state(2)])
    after, _ = step(jnp.asarray(state), x.masked(jnp.array([False, True])))
    np.testing.assert_array_equal(after[0], state[0])
    assert np.any(np.array(after[1]) != state[1])


def test_the_convolution_goes_on_where_it_stopped() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((1, 12, 6)).astype(np.float32)
    weight = rng.standard_normal((6, 4)).astype(np.float32)
    conv = jax.jit(short_conv)
    whole, last = conv(x, jnp.zeros((1, 6, 3)), weight, jnp.array([12]))
    padded = np.concatenate([np.zeros((3, 6)), x[0]])
    sums = np.stack([(padded[t : t + 4] * weight.T).sum(0) for t in range(12)])
    np.testing.assert_allclose(whole[0], sums / (1 + np.exp(-sums)), atol=1e-5)
    np.testing.assert_array_equal(last[0], x[0, -3:].T)
    # Two used rows of twelve, then the rest: what stands in unused rows must not count.
    head = np.full_like(x, np.nan)
    head[:, :2] = x[:, :2]
    first, past = conv(head, jnp.zeros((1, 6, 3)), weight, jnp.array([2]))
    rest, end = conv(np.roll(x, -2, axis=1), past, weight, jnp.array([10]))
    np.testing.assert_array_equal(first[0, :2], whole[0, :2])
    np.testing.assert_array_equal(rest[0, :10], whole[0, 2:])
    np.testing.assert_array_equal(end, last)
