"""One recurrent decoder layer over donated state buffers: norm, gated delta rule, norm, feed-forward."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from ..layer_kinds import RecurrentDims
from ..model_config import ModelConfig
from .basic import linear, rms_norm, row_sums, swiglu
from .gated_delta import DeltaTokens, delta_rule, short_conv
from .paged_attention import TileMeta

LayerParams = dict[str, jax.Array]

LONGEST_CHUNK_TOKENS = 16
_NORM_EPS = 1e-6


def chunk_tokens(page_size: int) -> int:
    """Tokens of a chunk of the delta rule: a divisor of the page size, so that every page border is a chunk border."""
    return math.gcd(page_size, LONGEST_CHUNK_TOKENS)


def recurrent_layer(
    config: ModelConfig,
    page_size: int,
    params: LayerParams,
    state: jax.Array,
    conv: jax.Array,
    unfinished: jax.Array,
    hidden: jax.Array,
    meta: TileMeta,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes one layer for a tile of one sequence, or one token of several.

    state: float32[slots, heads, k_dim, v_dim] and conv: float32[slots, channels, kernel - 1] are read and written at
    `meta.state_slots`, unfinished (see `unfinished_writes`) at `meta.request_rows`. A sequence whose first position is
    0 starts from zeros, and one that starts at a chunk's border reads no unfinished writes. Rows without an out slot
    leave all of them alone. hidden: float32[seqs * rows, hidden_size]. Returns (state, conv, unfinished, hidden).
    """
    if config.recurrent is None:
        raise ValueError("recurrent layers need their sizes")
    dims, (seqs, rows) = config.recurrent, meta.positions.shape
    normed = rms_norm(hidden, params["input_norm"], config.rms_norm_eps)
    slots, goes_on = meta.state_slots, meta.positions[:, 0] > 0
    past = jnp.where(goes_on[:, None, None], conv[slots], 0.0)
    start = jnp.where(goes_on[:, None, None, None], state[slots], 0.0)
    valid = meta.out_slots > 0
    num_tokens = jnp.sum(valid, axis=1, dtype=jnp.int32)
    qkv = linear(normed, params["qkv"]).reshape(seqs, rows, -1)
    mixed, past = short_conv(qkv, past, params["conv"], num_tokens)
    tokens = _delta_tokens(dims, params, mixed, normed.reshape(seqs, rows, -1))
    num_kept = meta.positions[:, 0] % chunk_tokens(page_size)
    kept = unfinished[meta.request_rows]
    end, kept, out = delta_rule(start, kept, tokens, num_kept, num_tokens)
    out = out.reshape(seqs * rows, *out.shape[2:])
    state, conv = state.at[slots].set(end), conv.at[slots].set(past)
    unfinished = unfinished.at[meta.request_rows].set(kept)
    hidden = hidden + linear(_gated(config, dims, params, out, normed), params["o"])
    normed = rms_norm(hidden, params["post_norm"], config.rms_norm_eps)
    return state, conv, unfinished, hidden + swiglu(normed, params["gate_up"], params["down"])


def unfinished_writes(dims: RecurrentDims, layer: int, requests: int, chunk: int) -> jax.Array:
    """What a layer's running requests have written since their last chunk border: zeros for `requests` rows.

    A request that starts or is resumed starts at a page border, which is a chunk border: so nothing of this belongs to
    the states that a prefix cache keeps.
    """
    shape = (requests, chunk, dims.num_value_heads, dims.written_width(layer))
    return jnp.zeros(shape, jnp.float32, device=jax.devices()[0])  # by name, as in the pools


def _delta_tokens(
    dims: RecurrentDims, params: LayerParams, mixed: jax.Array, x: jax.Array
) -> DeltaTokens:
    """From convolved q, k, v [seqs, n, channels] and the layer's input x [seqs, n, hidden]."""
    tokens = x.shape[:2]
    q, k, v = jnp.split(mixed, [dims.keys_width, 2 * dims.keys_width], axis=-1)
    group = dims.num_value_heads // dims.num_key_heads

    def heads(keys: jax.Array) -> jax.Array:
        keys = keys.reshape(*tokens, dims.num_key_heads, dims.key_dim)
        keys = keys * jax.lax.rsqrt(row_sums(keys * keys) + _NORM_EPS)
        return jnp.repeat(keys, group, axis=2)

    flat = x.reshape(-1, x.shape[-1])
    return DeltaTokens(
        k=heads(k),
        v=v.reshape(*tokens, dims.num_value_heads, dims.value_dim),
        beta=jax.nn.sigmoid(linear(flat, params["beta"])).reshape(*tokens, -1, 1),
        log_decay=_log_decay(dims, params, flat).reshape(*tokens, dims.num_value_heads, -1),
        q=heads(q) * dims.key_dim**-0.5,
    )


def _log_decay(dims: RecurrentDims, params: LayerParams, x: jax.Array) -> jax.Array:
    """float32[n, heads, 1 or k_dim], at most 0."""
    if "decay_down" in params:
        x = linear(x, params["decay_down"])
    step = jax.nn.softplus(linear(x, params["decay"], params["decay_bias"]))
    rate = jnp.exp(params["decay_rate_log"])[None, :, None]
    return -rate * step.reshape(x.shape[0], dims.num_value_heads, -1)


def _gated(
    config: ModelConfig, dims: RecurrentDims, params: LayerParams, out: jax.Array, x: jax.Array
) -> jax.Array:
    """The normed heads, gated by the layer's input: [n, heads * v_dim]."""
    normed = rms_norm(out, params["out_norm"], config.rms_norm_eps).reshape(out.shape[0], -1)
    if "gate_down" in params:
        return normed * jax.nn.sigmoid(linear(linear(x, params["gate_down"]), params["gate"]))
    return normed * jax.nn.silu(linear(x, params["gate"]))
