"""Sampling against distributions computed in plain numpy, and rows that do not see each other."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from sgl_jax_hicache.engine.forward_batch import SamplingParams
from sgl_jax_hicache.engine.sampler import (
    chosen_logprobs,
    greedy_tokens,
    sample_tokens,
    sampling_rows,
)

VOCAB = 50
sample = jax.jit(sample_tokens)


def logits_of(seed: int) -> np.ndarray[Any, Any]:
    return (2 * np.random.default_rng(seed).standard_normal(VOCAB)).astype(np.float32)


def draw(params: SamplingParams, logits: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """`count` draws: one row per step of one random stream."""
    rows = sampling_rows([params] * count, [params.seed or 0] * count, range(count), count, VOCAB)
    return np.array(sample(np.tile(logits, (count, 1)), rows))


def allowed_by_top_p(logits: np.ndarray[Any, Any], top_p: float) -> set[int]:
    order = np.argsort(-logits)
    weights = np.exp(logits - logits.max())
    total = np.cumsum(weights[order]) / weights.sum()
    return set(order[: int(np.searchsorted(total, top_p)) + 1].tolist())


def test_draws_follow_the_softmax() -> None:
    logits, count = logits_of(0), 20000
    drawn = draw(SamplingParams(temperature=0.7, seed=1), logits, count)
    want = np.exp(logits / 0.7 - (logits / 0.7).max())
    want /= want.sum()
    got = np.bincount(drawn, minlength=VOCAB) / count
    assert np.abs(got - want).max() < 4 * np.sqrt(0.25 / count)


@pytest.mark.parametrize("top_k", [1, 2, 7, 49])
def test_top_k_keeps_exactly_the_k_largest(top_k: int) -> None:
    logits = logits_of(1)
    drawn = draw(SamplingParams(temperature=5.0, top_k=top_k, seed=2), logits, 3000)
    assert set(drawn.tolist()) == set(np.argsort(-logits)[:top_k].tolist())


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9])
def test_top_p_keeps_exactly_the_nucleus(top_p: float) -> None:
    logits = (logits_of(2) / 2).astype(np.float32)
    drawn = draw(SamplingParams(temperature=1.0, top_p=top_p, seed=3), logits, 6000)
    assert set(drawn.tolist()) == allowed_by_top_p(logits, top_p)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_p=5e-324, seed=3),
        SamplingParams(temperature=1.0, top_p=1e-40, seed=3),
        SamplingParams(temperature=2e-38, seed=3),
        SamplingParams(temperature=5e-324, seed=3),
    ],
    ids=["top_p rounds to 0", "top_p", "temperature", "temperature rounds to 0"],
)
def test_what_a_float32_hardly_holds_leaves_the_likeliest_token(params: SamplingParams) -> None:
    logits = np.array([90.0, 10.0, 80.0, 100.0] + [70.0] * (VOCAB - 4), np.float32)
    assert set(draw(params, logits, 100).tolist()) == {3}


def test_top_p_counts_within_top_k() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1] + [1e-9] * (VOCAB - 4), np.float32))
    params = SamplingParams(temperature=1.0, top_k=3, top_p=0.7, seed=4)
    assert set(draw(params, logits, 500).tolist()) == {0, 1}


def test_off_settings_keep_everything() -> None:
    logits = np.zeros(VOCAB, np.float32)
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=0)):
        assert set(draw(params, logits, 3000).tolist()) == set(range(VOCAB))


def test_rows_depend_on_seed_and_step_alone() -> None:
    logits = logits_of(5)
    params = SamplingParams(temperature=1.0)
    rows = sampling_rows([params] * 6, [1, 1, 2, 1, 2, 1], [0, 1, 0, 0, 0, 1], 8, VOCAB)
    drawn = np.array(sample(np.tile(logits, (8, 1)), rows))
    assert drawn[0] == drawn[3]
    assert drawn[2] == drawn[4]
    assert drawn[1] == drawn[5]
    alone = sampling_rows([params], [2], [0], 8, VOCAB)
    mixed = np.stack([logits_of(seed) for seed in (5, 6, 7, 8, 9, 10, 11, 12)])
    assert np.array(sample(mixed, alone))[0] == drawn[2]
    many = draw(SamplingParams(temperature=1.0, seed=1), logits, 64)
    other = draw(SamplingParams(temperature=1.0, seed=2), logits, 64)
    assert len(set(many.tolist())) > 8
    assert not np.array_equal(many, other)


def test_temperature_zero_is_greedy_among_sampled_rows() -> None:
    logits = np.stack([logits_of(seed) for seed in range(4)])
    settings = [SamplingParams(temperature=t) for t in (0.0, 1.0, 0.0, 1.0)]
    drawn = np.array(sample(logits, sampling_rows(settings, [1] * 4, [0] * 4, 4, VOCAB)))
    assert drawn[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()
    assert np.array(greedy_tokens(np.zeros((2, VOCAB), np.float32))).tolist() == [0, 0]


def test_log_probabilities_are_of_the_unscaled_logits() -> None:
    logits = np.stack([logits_of(seed) for seed in range(3)])
    chosen, every = chosen_logprobs(logits, np.array([4, 5, 6]))
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(np.array(every), want, atol=1e-5)
    np.testing.assert_allclose(np.array(chosen), want[[0, 1, 2], [4, 5, 6]], atol=1e-5)
