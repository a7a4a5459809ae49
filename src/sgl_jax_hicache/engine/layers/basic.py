"""Linear maps, RMS norm, rotary positions and SwiGLU, all in float32.

Weights are [out, in], as checkpoints store them, and are contracted over their last axis. That is no matter of taste:
on CPU, XLA sums such a product in the same order for any number of rows from 2 up, while with [in, out] weights it
splits the sum for fewer than 64 rows, and its reductions pick their order by the whole shape. As written here, the KV
of a token is bit for bit the same whatever chunk or batch it was computed in.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_SUM_COLUMNS = 8  # one column would become a matrix-vector product, which sums in yet another order


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [rows, in] times weight [out, in], plus bias [out]: [rows, out]."""
    y = jax.lax.dot_general(
        x, weight, (((x.ndim - 1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST
    )
    return y if bias is None else y + jnp.broadcast_to(bias, y.shape)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Scales the last axis of x to unit mean square, then by weight."""
    total = row_sums(x * x)
    return x * jax.lax.rsqrt(total / x.shape[-1] + eps) * jnp.broadcast_to(weight, x.shape)


def row_sums(x: jax.Array) -> jax.Array:
    """Sums over the last axis, kept as 1, in an order that does not depend on the number of rows.

    XLA's own reduction picks its order by the whole shape; a product with ones does not.
    """
    flat = x.reshape(-1, x.shape[-1])
    sums = linear(flat, jnp.ones((_SUM_COLUMNS, x.shape[-1]), jnp.float32))
    return sums[:, :1].reshape(*x.shape[:-1], 1)


def rope_tables(positions: jax.Array, dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [rows, dim // 2], for int32 positions [rows]."""
    inverse = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angles = positions.astype(jnp.float32)[:, None] * inverse[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the halves of the last axis of x [rows, heads, dim] by tables [rows, dim // 2]."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def swiglu(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """silu(gate) * up through `gate_up` [2 * inner, hidden], then `down` [hidden, inner]."""
    gate, up = jnp.split(linear(x, gate_up), 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, down)
