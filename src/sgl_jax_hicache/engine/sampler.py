"""From logits to tokens: greedy, temperature, top-k, top-p, each request with its own random stream.

A row's token depends on that row alone: its logits, its settings, its seed and how many tokens it has sampled; never on
its neighbours in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .forward_batch import SamplingParams

_LEAST = 1e-6
"""Temperatures and top_p below it count as this much, which leaves the likeliest token alone: a float32 has no room for
much smaller ones, and a top_p that rounds to 0 would keep no token at all.
"""


class SamplingRows(NamedTuple):
    """Sampling settings of a padded batch, one entry per row.

    temperature, top_p: float32; top_k: int32 (the vocabulary size where off); seed, step: uint32.
    """

    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    seed: jax.Array
    step: jax.Array


def sampling_rows(
    settings: Sequence[SamplingParams],
    seeds: Sequence[int],
    steps: Sequence[int],
    num_rows: int,
    vocab_size: int,
) -> SamplingRows:
    """Packs the settings of a batch into arrays of `num_rows`; padding rows are greedy."""
    padding = num_rows - len(settings)
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in settings]
    return SamplingRows(
        temperature=_padded([p.temperature for p in settings], padding, np.float32),
        top_p=_padded([p.top_p for p in settings], padding, np.float32),
        top_k=_padded(top_k, padding, np.int32),
        seed=_padded([seed & 0xFFFFFFFF for seed in seeds], padding, np.uint32),
        step=_padded(steps, padding, np.uint32),
    )


def _padded(values: Sequence[float], padding: int, dtype: type[np.generic]) -> jax.Array:
    padded: jax.Array = jax.device_put(np.asarray([*values, *[0] * padding], dtype))
    return padded


def greedy_tokens(logits: jax.Array) -> jax.Array:
    """int32[rows]: the first index of the largest logit."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample_tokens(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """int32[rows] drawn from float32 logits [rows, vocab]; rows of temperature 0 take the largest."""
    drawn = jax.vmap(_sample_row)(logits, *rows)
    return jnp.where(rows.temperature > 0, drawn, greedy_tokens(logits)).astype(jnp.int32)


def _sample_row(
    logits: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    seed: jax.Array,
    step: jax.Array,
) -> jax.Array:
    scaled = logits / jnp.where(temperature > 0, jnp.maximum(temperature, _LEAST), 1.0)
    order = _sortable(scaled)
    in_top_k = order >= _largest_cut(order, jnp.ones_like(scaled), top_k.astype(jnp.float32))
    weights = jnp.where(in_top_k, jax.nn.softmax(scaled), 0.0)
    # top_p >= 1 must keep all, even where rounding makes the sum of some of them reach the whole.
    needed = jnp.maximum(top_p, _LEAST) * jnp.sum(weights)
    nucleus = order >= _largest_cut(order, weights, needed)
    kept = in_top_k & (nucleus | (top_p >= 1.0))
    key = jax.random.fold_in(jax.random.key(seed), step)
    noise = jax.random.gumbel(key, scaled.shape, jnp.float32)
    return jnp.argmax(jnp.where(kept, scaled + noise, -jnp.inf))


def _sortable(values: jax.Array) -> jax.Array:
    """int32 that order like the float32 values."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _largest_cut(order: jax.Array, weights: jax.Array, needed: jax.Array) -> jax.Array:
    """The largest cut such that entries with order >= cut weigh `needed` or more together.

    Found bit by bit from the top: 32 passes over the row cost a tenth of sorting it.
    """
    lowest = jnp.int32(-(2**31))

    def try_bit(i: jax.Array, cut: jax.Array) -> jax.Array:
        # Setting the sign bit of the lowest int32 clears it: the first try splits at zero.
        raised = cut ^ jnp.left_shift(jnp.int32(1), 31 - i)
        enough = jnp.sum(jnp.where(order >= raised, weights, 0.0)) >= needed
        return jnp.where(enough, raised, cut)

    cut: jax.Array = jax.lax.fori_loop(0, 32, try_bit, lowest)
    return cut


def chosen_logprobs(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(log-softmax of the unscaled logits at `tokens` [rows], all log probabilities [rows, vocab])."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    return jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0], logprobs
