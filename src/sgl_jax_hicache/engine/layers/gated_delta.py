"""The gated delta rule and the short causal convolution before it, in float32.

Per head, with state S [k_dim, v_dim], key k, value v, query q, write strength beta in [0, 1] and log decay g <= 0:

    S <- exp(g) * S;   u = beta * (v - S^T k);   S <- S + k u^T;   o = S^T q

`g` is one number per head, or one per key channel. Tokens are taken in chunks that begin at multiples of `chunk` of the
absolute position: within one the u of all tokens solve one triangular system, (I + A) U = R, and the rest is matrix
products. The state moves on at the ends of chunks only; what the tokens of an unfinished chunk write is kept beside it
and joins in when its next tokens come, one at a time in decode steps or many in a prompt. Every chunk has one shape, in
which absent tokens have beta = k = 0 and g = 0 and add exact zeros. So states and outputs do not depend on how a
sequence was cut into steps, bit for bit.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp

_HIGHEST = jax.lax.Precision.HIGHEST

# Products with a single row are summed in an order that depends on the number of sequences.
_FEWEST_ROWS = 2


class DeltaTokens(NamedTuple):
    """What the rule reads of tokens.

    k, q: float32[seqs, n, heads, k_dim]; v: float32[seqs, n, heads, v_dim]; beta: float32[seqs, n, heads, 1];
    log_decay: float32[seqs, n, heads, 1 or k_dim].
    """

    k: jax.Array
    v: jax.Array
    beta: jax.Array
    log_decay: jax.Array
    q: jax.Array


def delta_rule(
    state: jax.Array,
    unfinished: jax.Array,
    x: DeltaTokens,
    num_unfinished: jax.Array,
    num_tokens: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The next tokens of several sequences.

    state: float32[seqs, heads, k_dim, v_dim] at the start of the chunk that each sequence stands in. unfinished:
    float32[seqs, chunk, heads, widths of k, v, beta and log_decay together], what this chunk's tokens write, of which
    the first num_unfinished int32[seqs] count. x: the next tokens, n = rows, of which the first num_tokens int32[seqs]
    count; rows is 1 or a multiple of the chunk. Returns (state, unfinished, o float32[seqs, rows, heads, v_dim], of any
    content in rows that do not count).
    """
    chunk, rows, k_dim = unfinished.shape[1], *x.k.shape[1::2]
    length = chunk if rows == 1 else chunk + rows
    total = num_unfinished + num_tokens
    # The outputs of an unfinished chunk's tokens are known: its queries are not kept.
    kept = jnp.pad(unfinished, ((0, 0), (0, 0), (0, 0), (0, k_dim)))
    tokens = _concatenated(kept, jnp.concatenate(x, axis=-1), num_unfinished, total, length)
    borders = list(accumulate(a.shape[-1] for a in x[:-1]))

    def visit(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        state, out = carry
        part = jax.lax.dynamic_slice_in_dim(tokens, i * chunk, chunk, 1).swapaxes(1, 2)
        part = jnp.pad(part, ((0, 0), (0, 0), (0, max(_FEWEST_ROWS - chunk, 0)), (0, 0)))
        is_full = total >= (i + 1) * chunk
        state, o = _one_chunk(state, DeltaTokens(*jnp.split(part, borders, axis=-1)), is_full)
        o = o[:, :, :chunk].swapaxes(1, 2)
        return state, jax.lax.dynamic_update_slice_in_dim(out, o, i * chunk, 1)

    # A bound known at compile time would let a single chunk be fused, and rounded, in its own way.
    num_chunks = (jnp.max(total) + chunk - 1) // chunk
    out = jnp.zeros((x.v.shape[0], length, *x.v.shape[2:]))
    state, out = jax.lax.fori_loop(0, num_chunks, visit, (state, out))
    kept = _window(tokens[..., :-k_dim], total // chunk * chunk, chunk)
    return state, kept, _window(out, num_unfinished, rows)


def _concatenated(
    old: jax.Array, new: jax.Array, num_old: jax.Array, total: jax.Array, length: int
) -> jax.Array:
    """Tokens of `old` up to num_old, then of `new` up to `total`, then zeros: [seqs, length, heads, width]."""
    place = jnp.arange(length, dtype=jnp.int32)[None]
    row = jnp.clip(place - num_old[:, None], 0, new.shape[1] - 1)
    moved = jnp.take_along_axis(new, row[..., None, None], axis=1)
    old = jnp.pad(old, ((0, 0), (0, length - old.shape[1]), (0, 0), (0, 0)))
    is_old, is_there = place < num_old[:, None], place < total[:, None]
    tokens = jnp.where(is_old[..., None, None], old, moved)
    return jnp.where(is_there[..., None, None], tokens, 0.0)


def _window(x: jax.Array, start: jax.Array, count: int) -> jax.Array:
    """`count` tokens of each sequence of x [seqs, n, heads, width] from start int32[seqs] on, the last one repeated."""
    place = start[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    place = jnp.minimum(place, x.shape[1] - 1)
    return jnp.take_along_axis(x, place[..., None, None], axis=1)


def _one_chunk(state: jax.Array, x: DeltaTokens, is_full: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All tokens of one chunk at once; x has [seqs, heads, chunk, width] here.

    Returns (the state, moved on where is_full bool[seqs], o [seqs, heads, chunk, v_dim]).
    """
    total = jnp.cumsum(x.log_decay, axis=2)
    since_start = jnp.exp(total)
    place = jnp.arange(x.k.shape[2])
    row, column = place[None, None, :, None], place[None, None, None]
    # Queries and keys meet the state and the keys in one product each: the state is read once.
    both = jnp.concatenate([x.q * since_start, x.k * since_start], axis=2)
    from_state, recalled = jnp.split(jnp.matmul(both, state, precision=_HIGHEST), 2, axis=2)
    q_by_k, k_by_k = _decayed_products(x.q, x.k, total)
    solve = _unit_lower_inverse(jnp.where(row > column, x.beta * k_by_k, 0.0))
    u = jnp.matmul(solve, x.beta * (x.v - recalled), precision=_HIGHEST)
    seen = jnp.where(row >= column, q_by_k, 0.0)
    out = from_state + jnp.matmul(seen, u, precision=_HIGHEST)

    def moved_on() -> jax.Array:
        until_end = jnp.exp(total[:, :, -1:] - total)
        written = jnp.einsum("shjk,shjv->shkv", x.k * until_end, u, precision=_HIGHEST)
        end = state * since_start[:, :, -1, :, None] + written
        return jnp.where(is_full[:, None, None, None], end, state)

    return jax.lax.cond(jnp.any(is_full), moved_on, lambda: state), out


def _unit_lower_inverse(below: jax.Array) -> jax.Array:
    """The inverse of I + below [..., n, n], strictly lower triangular, n a power of two.

    Blocks of twice the size at a time: [[P, 0], [C, Q]] has the inverse [[P', 0], [-Q' C P', Q']]. Products only, where
    a solver would call out to LAPACK once a head.
    """
    n, size = below.shape[-1], 1
    inverse = jnp.broadcast_to(jnp.eye(n), below.shape)
    block = jnp.arange(n)
    while size < n:
        row, column = block[:, None] // size, block[None] // size
        is_corner = (row % 2 == 1) & (column == row - 1)
        corner = jnp.where(is_corner[None, None], below, 0.0)
        left = jnp.matmul(inverse, corner, precision=_HIGHEST)
        inverse = inverse - jnp.matmul(left, inverse, precision=_HIGHEST)
        size *= 2
    return inverse


def _decayed_products(q: jax.Array, k: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """q_i and k_i times k_j as decayed from j to i, [seqs, heads, i, j] each; meaningless for j > i.

    The decay is taken as exp of a difference, never as a quotient of two exps, which would overflow.
    """
    gap = total[..., :, None, :] - total[..., None, :, :]
    decay = jnp.exp(jnp.minimum(gap, 0.0))  # [seqs, heads, i, j, 1 or k_dim]
    if decay.shape[-1] == 1:
        both = jnp.concatenate([q, k], axis=2)
        products = jnp.einsum("shik,shjk->shij", both, k, precision=_HIGHEST)
        q_by_k, k_by_k = jnp.split(products, 2, axis=2)
        return decay[..., 0] * q_by_k, decay[..., 0] * k_by_k
    both = jnp.stack([q, k], axis=3)  # [seqs, heads, i, 2, k_dim]
    keys = k[..., None, :, :] * decay
    products = jnp.einsum("shick,shijk->shijc", both, keys, precision=_HIGHEST)
    return products[..., 0], products[..., 1]


def short_conv(
    x: jax.Array, past: jax.Array, weight: jax.Array, num_tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Depthwise causal convolution, then silu.

    x: float32[seqs, rows, channels]; past: float32[seqs, channels, kernel - 1], the newest input last; weight:
    float32[channels, kernel], the current token's tap last; num_tokens: int32[seqs], used rows of each sequence.
    Returns (y like x, the past after the used rows).
    """
    rows, kernel = x.shape[1], weight.shape[1]
    inputs = jnp.concatenate([past.swapaxes(1, 2), x], axis=1)
    taps = weight.T[:, None, None]
    y = inputs[:, :rows] * taps[0]
    for tap in range(1, kernel):
        y = y + inputs[:, tap : tap + rows] * taps[tap]

    def tail(sequence: jax.Array, start: jax.Array) -> jax.Array:
        kept: jax.Array = jax.lax.dynamic_slice_in_dim(sequence, start, kernel - 1)
        return kept.T

    return jax.nn.silu(y), jax.vmap(tail)(inputs, num_tokens)
