"""The gated delta rule in chunks and in steps, against the rule itself token by token, and against each other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_reference import delta_recurrence

from sgl_jax_hicache.engine.layers.gated_delta import DeltaTokens, delta_rule, short_conv

HEADS, K_DIM, V_DIM, CHUNK, ROWS = 4, 16, 24, 16, 64

Array = np.ndarray[Any, Any]

rule = jax.jit(delta_rule)


def part(x: DeltaTokens, start: int, stop: int) -> DeltaTokens:
    """Tokens start .. stop-1."""
    return DeltaTokens(*(a[start:stop] for a in x))


def recurrence(x: DeltaTokens, state: Array) -> tuple[Array, Array]:
    """(outputs, end state) of the rule token by token, in float64."""
    q, k, v, beta, log_decay = (
        np.asarray(a, np.float64) for a in (x.q, x.k, x.v, x.beta[..., 0], x.log_decay)
    )
    return delta_recurrence(q, k, v, beta, log_decay, state.astype(np.float64))


def inputs(channels: int, tokens: int = ROWS, decay: float = 0.3, seed: int = 0) -> DeltaTokens:
    """Random tokens of one sequence, without its axis, with unit keys, as the layer makes them; `decay` is the mean of
    -log_decay."""
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((tokens, HEADS, K_DIM)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((tokens, HEADS, V_DIM))
    beta = rng.uniform(0.0, 1.0, (tokens, HEADS, 1))
    log_decay = -decay * rng.exponential(size=(tokens, HEADS, channels))
    return DeltaTokens(*(np.asarray(a, np.float32) for a in (k, v, beta, log_decay, q)))  # type: ignore[arg-type]


class Sequences:
    """Sequences that go on together. Whatever does not count is NaN, or 7 in rows of no token."""

    def __init__(self, channels: int, starts: list[Array], chunk: int = CHUNK) -> None:
        self._chunk = chunk
        self.state = jnp.asarray(np.stack(starts))
        written = K_DIM + V_DIM + 1 + channels
        self._unfinished = jnp.full((len(starts), chunk, HEADS, written), jnp.nan)
        self._nothing = part(inputs(channels), 0, 0)
        self._lengths = np.zeros(len(starts), np.int32)

    def go_on(self, parts: list[DeltaTokens], rows: int = ROWS) -> list[Array]:
        """The outputs of the next tokens of each sequence, computed in a tile of so many rows."""
        counts = np.array([len(one.q) for one in parts], np.int32)
        padded = [
            np.stack([_padded(a, rows) for a in column]) for column in zip(*parts, strict=True)
        ]
        self.state, self._unfinished, out = rule(
            self.state, self._unfinished, DeltaTokens(*padded), self._lengths % self._chunk, counts
        )
        self._lengths = self._lengths + counts
        return [np.array(one)[:count] for one, count in zip(out, counts, strict=True)]

    def complete(self) -> Array:
        """The first sequence's state behind its last token: tokens that write nothing fill the chunk."""
        absent = -int(self._lengths[0]) % self._chunk
        if absent:
            zeros = DeltaTokens(
                *(np.zeros((absent, *a.shape[1:]), np.float32) for a in self._nothing)
            )  # type: ignore[arg-type]
            self.go_on([zeros] + [self._nothing] * (len(self._lengths) - 1))
        return np.array(self.state[0])


def _padded(tokens: Array, rows: int) -> Array:
    end = ((0, rows - len(tokens)), *[(0, 0)] * (tokens.ndim - 1))
    return np.pad(tokens, end, constant_values=7.0)


def run(
    state: Array, x: DeltaTokens, cuts: tuple[int, ...] = (), chunk: int = CHUNK
) -> tuple[Array, Array]:
    """(end state, outputs) of tokens that come in parts which end at `cuts`; parts of one token as decode steps."""
    sequence, outs = Sequences(x.log_decay.shape[-1], [state], chunk), []
    for start, stop in zip((0, *cuts), (*cuts, len(x.q)), strict=True):
        rows = 1 if stop - start == 1 else ROWS
        outs += sequence.go_on([part(x, start, stop)], rows)
    return sequence.complete(), np.concatenate(outs)


def start_state(seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal((HEADS, K_DIM, V_DIM)).astype(np.float32)


STEPS = tuple(range(1, ROWS))


@pytest.mark.parametrize("channels", [1, K_DIM])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 50, 64])
def test_chunks_match_the_recurrence(channels: int, length: int) -> None:
    x, state = inputs(channels, length), start_state()
    got_state, got = run(state, x)
    want, want_state = recurrence(x, state)
    np.testing.assert_allclose(got, want, atol=2e-5)
    np.testing.assert_allclose(got_state, want_state, atol=2e-5)


@pytest.mark.parametrize("channels", [1, K_DIM])
@pytest.mark.parametrize("decay", [1e-4, 5.0, 300.0])
def test_weak_and_strong_decays_stay_finite_and_exact(channels: int, decay: float) -> None:
    x, state = inputs(channels, decay=decay), start_state()
    got_state, got = run(state, x)
    want, want_state = recurrence(x, state)
    np.testing.assert_allclose(got, want, atol=1e-4)
    np.testing.assert_allclose(got_state, want_state, atol=1e-4)


@pytest.mark.parametrize("channels", [1, K_DIM])
def test_repeated_keys_written_at_full_strength_are_solved(channels: int) -> None:
    x = inputs(channels, decay=1e-3)
    x = x._replace(k=np.broadcast_to(x.k[:1], x.k.shape), beta=np.ones_like(x.beta))
    got_state, _ = run(start_state(), x)
    np.testing.assert_allclose(got_state, recurrence(x, start_state())[1], atol=1e-4)


@pytest.mark.parametrize("channels", [1, K_DIM])
@pytest.mark.parametrize(
    "cuts", [STEPS, (16, 32, 48), (1, 3, 20, 37), (33, *range(34, 60)), (*range(1, 30), 62)]
)
def test_how_tokens_are_cut_into_steps_changes_nothing_bit_for_bit(
    channels: int, cuts: tuple[int, ...]
) -> None:
    x = inputs(channels)
    want_state, want = run(start_state(), x)
    state, outs = run(start_state(), x, cuts)
    np.testing.assert_array_equal(outs, want)
    np.testing.assert_array_equal(state, want_state)


@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("channels", [1, K_DIM])
def test_sequences_that_step_together_stay_what_they_are_alone(channels: int, chunk: int) -> None:
    """Each stands at another place of its chunk, one has no token in the step."""
    lengths, more = (13, 16, 30, 7), 20
    tokens = [inputs(channels, length + more, seed=length) for length in lengths]
    starts = [start_state(length) for length in lengths]
    alone = [run(state, x, chunk=chunk)[1] for state, x in zip(starts, tokens, strict=True)]
    together = Sequences(channels, starts, chunk)
    together.go_on([part(x, 0, length) for x, length in zip(tokens, lengths, strict=True)])
    for step in range(more):
        parts = [
            part(x, n + step, n + step + 1) for x, n in zip(tokens[:-1], lengths, strict=False)
        ]
        before = together.state[-1]
        outs = together.go_on([*parts, part(tokens[-1], 0, 0)], rows=1)
        np.testing.assert_array_equal(together.state[-1], before)
        for out, want, length in zip(outs[:-1], alone, lengths, strict=False):
            np.testing.assert_array_equal(out[0], want[length + step])


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
