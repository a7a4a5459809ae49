"""The gated delta rule and the short causal convolution before it, in float32.

Per head, with state S [k_dim, v_dim], key k, value v, query q, write strength beta in [0, 1] and log decay g <= 0:

    S <- exp(g) * S;   u = beta * (v - S^T k);   S <- S + k u^T;   o = S^T q

`g` is one number per head, or one per key channel. `delta_step` does just that for one token. `delta_chunks` takes
`chunk` tokens at a time: within a chunk the u of all tokens solve one triangular system, (I + A) U = R, and the rest is
matrix products. A tile must not cross a chunk border of the absolute position without starting on one: chunks then
consist of the same tokens however a prompt was cut, and as every chunk has one shape (absent tokens have beta = k = 0
and g = 0, which add exact zeros), the state at a border does not depend on the cut, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_HIGHEST = jax.lax.Precision.HIGHEST


class DeltaInputs(NamedTuple):
    """What the rule reads of each token; the leading axes are one [batch] (steps) or [tokens] (chunks).

    q, k: float32[n, heads, k_dim]; v: float32[n, heads, v_dim]; beta: float32[n, heads];
    log_decay: float32[n, heads, 1 or k_dim].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array
    log_decay: jax.Array

    def masked(self, valid: jax.Array) -> DeltaInputs:
        """Without the effect on the state of tokens where valid bool[n] is False."""
        wide = valid[:, None, None]
        return self._replace(
            k=jnp.where(wide, self.k, 0.0),
            beta=jnp.where(valid[:, None], self.beta, 0.0),
            log_decay=jnp.where(wide, self.log_decay, 0.0),
        )


def delta_step(state: jax.Array, x: DeltaInputs) -> tuple[jax.Array, jax.Array]:
    """One token for each row: state [n, heads, k_dim, v_dim] -> (new state, o [n, heads, v_dim])."""
    decayed = state * jnp.exp(x.log_decay)[..., None]
    recalled = jnp.einsum("nhk,nhkv->nhv", x.k, decayed, precision=_HIGHEST)
    u = x.beta[..., None] * (x.v - recalled)
    state = decayed + x.k[..., None] * u[..., None, :]
    return state, jnp.einsum("nhk,nhkv->nhv", x.q, state, precision=_HIGHEST)


def delta_chunks(
    state: jax.Array, x: DeltaInputs, num_tokens: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """The first `num_tokens` of one sequence's n tokens, in chunks of `chunk` (a divisor of n).

    state: float32[heads, k_dim, v_dim] before the first token; tokens from num_tokens on must be masked.
    Returns (the state after the last token, o float32[n, heads, v_dim], zeros where nothing was computed).
    """

    def visit(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        state, out = carry
        part = DeltaInputs(*(jax.lax.dynamic_slice_in_dim(a, i * chunk, chunk) for a in x))
        state, o = _one_chunk(state, part)
        return state, jax.lax.dynamic_update_slice_in_dim(out, o, i * chunk, 0)

    # A bound known at compile time would let a single chunk be fused, and rounded, in its own way.
    num_chunks = (num_tokens + chunk - 1) // chunk
    finished: tuple[jax.Array, jax.Array] = jax.lax.fori_loop(
        0, num_chunks, visit, (state, jnp.zeros_like(x.v))
    )
    return finished


def _one_chunk(state: jax.Array, x: DeltaInputs) -> tuple[jax.Array, jax.Array]:
    """One chunk of one sequence, all its tokens at once."""
    size = x.k.shape[0]
    q, k, v, log_decay = (a.swapaxes(0, 1) for a in (x.q, x.k, x.v, x.log_decay))
    beta = x.beta.T[..., None]
    total = jnp.cumsum(log_decay, axis=1)  # [heads, size, 1 or k_dim]
    since_start = jnp.exp(total)
    ones = jnp.ones((1, size, size), bool)
    earlier, until_now = jnp.tril(ones, -1), jnp.tril(ones)
    q_by_k, k_by_k = _decayed_products(q, k, total)
    solve = _unit_lower_inverse(jnp.where(earlier, beta * k_by_k, 0.0))
    recalled = jnp.einsum("hik,hkv->hiv", k * since_start, state, precision=_HIGHEST)
    u = jnp.matmul(solve, beta * (v - recalled), precision=_HIGHEST)
    from_state = jnp.einsum("hik,hkv->hiv", q * since_start, state, precision=_HIGHEST)
    seen = jnp.where(until_now, q_by_k, 0.0)
    out = from_state + jnp.einsum("hij,hjv->hiv", seen, u, precision=_HIGHEST)
    until_end = jnp.exp(total[:, -1:] - total)
    written = jnp.einsum("hjk,hjv->hkv", k * until_end, u, precision=_HIGHEST)
    state = state * since_start[:, -1, :, None] + written
    return state, out.swapaxes(0, 1)


def _unit_lower_inverse(below: jax.Array) -> jax.Array:
    """The inverse of I + below [heads, n, n], strictly lower triangular, n a power of two.

    Blocks of twice the size at a time: [[P, 0], [C, Q]] has the inverse [[P', 0], [-Q' C P', Q']]. Products only, where
    a solver would call out to LAPACK once a head.
    """
    n, size = below.shape[-1], 1
    inverse = jnp.broadcast_to(jnp.eye(n), below.shape)
    block = jnp.arange(n)
    while size < n:
        row, column = block[None, :, None] // size, block[None, None, :] // size
        corner = jnp.where((row % 2 == 1) & (column == row - 1), below, 0.0)
        left = jnp.matmul(inverse, corner, precision=_HIGHEST)
        inverse = inverse - jnp.matmul(left, inverse, precision=_HIGHEST)
        size *= 2
    return inverse


def _decayed_products(q: jax.Array, k: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """q_i and k_i times k_j as decayed from j to i, [heads, i, j]; meaningless for j > i.

    The decay is taken as exp of a difference, never as a quotient of two exps, which would overflow.
    """
    gap = jnp.minimum(total[:, :, None] - total[:, None, :], 0.0)  # [heads, i, j, 1 or k_dim]
    if gap.shape[-1] == 1:
        decay = jnp.exp(gap[..., 0])
        return tuple(  # type: ignore[return-value]
            decay * jnp.einsum("hik,hjk->hij", a, k, precision=_HIGHEST) for a in (q, k)
        )
    keys = k[:, None] * jnp.exp(gap)
    return tuple(  # type: ignore[return-value]
        jnp.einsum("hik,hijk->hij", a, keys, precision=_HIGHEST) for a in (q, k)
    )


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
