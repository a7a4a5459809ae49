"""One decoder layer over one donated KV buffer: norm, attention, norm, feed-forward."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..model_config import MLADims, ModelConfig
from .basic import apply_rope, linear, rms_norm, swiglu
from .paged_attention import TileMeta, attend, write_rows

LayerParams = dict[str, jax.Array]


def decoder_layer(
    config: ModelConfig,
    page_size: int,
    params: LayerParams,
    kv: jax.Array,
    hidden: jax.Array,
    meta: TileMeta,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes one attention layer for a tile; with a window a token sees only that many, itself included.

    hidden: float32[seqs * rows, hidden_size]. The KV of the tile is written to `meta.out_slots` first and then read
    back through the pages, so that a token attends to exactly what later steps will find. Returns (kv, hidden).
    """
    normed = rms_norm(hidden, params["input_norm"], config.rms_norm_eps)
    if config.mla is None:
        kv, mixed = _mha(config, page_size, params, kv, normed, meta, window)
    else:
        kv, mixed = _mla(config, page_size, params, kv, normed, meta)
    hidden = hidden + mixed
    normed = rms_norm(hidden, params["post_norm"], config.rms_norm_eps)
    return kv, hidden + swiglu(normed, params["gate_up"], params["down"])


def _mha(
    config: ModelConfig,
    page_size: int,
    params: LayerParams,
    kv: jax.Array,
    x: jax.Array,
    meta: TileMeta,
    window: int | None,
) -> tuple[jax.Array, jax.Array]:
    heads, kv_heads, dim = config.num_attention_heads, config.num_kv_heads, config.head_dim
    seqs, rows = meta.positions.shape
    qkv = linear(x, params["qkv"], params.get("qkv_bias"))
    q, k, v = jnp.split(qkv, [heads * dim, (heads + kv_heads) * dim], axis=-1)
    q, k = q.reshape(-1, heads, dim), k.reshape(-1, kv_heads, dim)
    if config.qk_norm:
        q = rms_norm(q, params["q_norm"], config.rms_norm_eps)
        k = rms_norm(k, params["k_norm"], config.rms_norm_eps)
    q, k = apply_rope(q, meta.cos, meta.sin), apply_rope(k, meta.cos, meta.sin)
    fused = jnp.stack([k, v.reshape(-1, kv_heads, dim)], axis=2)
    slots = meta.out_slots.reshape(-1)
    new_rows = fused.reshape(-1, *kv.shape[2:]).astype(kv.dtype)
    kv = write_rows(kv, new_rows, (slots // page_size, slots % page_size))

    def read_pages(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        pairs = pages.reshape(pages.shape[0], -1, kv_heads, 2, dim).astype(jnp.float32)
        return pairs[..., 0, :], pairs[..., 1, :]

    grouped = q.reshape(seqs, rows, kv_heads, heads // kv_heads, dim)
    out = attend(
        grouped,
        kv,
        read_pages,
        meta,
        page_size=page_size,
        v_dim=dim,
        scale=dim**-0.5,
        window=window,
    )
    return kv, linear(out.reshape(-1, heads * dim), params["o"], params.get("o_bias"))


def _mla(
    config: ModelConfig,
    page_size: int,
    params: LayerParams,
    kv: jax.Array,
    x: jax.Array,
    meta: TileMeta,
) -> tuple[jax.Array, jax.Array]:
    if config.mla is None:
        raise ValueError("latent attention needs MLA sizes")
    dims, heads = config.mla, config.num_attention_heads
    seqs, rows = meta.positions.shape
    kv = _write_latent(config, dims, page_size, params, kv, x, meta)
    q = _mla_query(config, dims, params, x)
    q_nope, q_rope = q[..., : dims.qk_nope_head_dim], q[..., dims.qk_nope_head_dim :]
    absorbed = _per_head(q_nope, params["key_up"])
    q = jnp.concatenate([absorbed, apply_rope(q_rope, meta.cos, meta.sin)], axis=-1)

    def read_pages(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        flat = pages.reshape(*pages.shape[:2], -1, dims.latent_dim)[:, :, :page_size]
        latent = flat.reshape(pages.shape[0], -1, 1, dims.latent_dim).astype(jnp.float32)
        return latent, latent[..., : dims.kv_lora_rank]

    grouped = q.reshape(seqs, rows, 1, heads, dims.latent_dim)
    out = attend(
        grouped,
        kv,
        read_pages,
        meta,
        page_size=page_size,
        v_dim=dims.kv_lora_rank,
        scale=dims.qk_head_dim**-0.5,
    )
    values = _per_head(out.reshape(-1, heads, dims.kv_lora_rank), params["value_up"])
    return kv, linear(values.reshape(-1, heads * dims.v_head_dim), params["o"])


def _write_latent(
    config: ModelConfig,
    dims: MLADims,
    page_size: int,
    params: LayerParams,
    kv: jax.Array,
    x: jax.Array,
    meta: TileMeta,
) -> jax.Array:
    """Writes the normed latent and the rotated shared key of each token."""
    down = linear(x, params["kv_a"])
    latent = rms_norm(down[:, : dims.kv_lora_rank], params["kv_a_norm"], config.rms_norm_eps)
    key = apply_rope(down[:, None, dims.kv_lora_rank :], meta.cos, meta.sin)[:, 0]
    slots, packing = meta.out_slots.reshape(-1), kv.shape[2]
    offset = slots % page_size
    new_rows = jnp.concatenate([latent, key], axis=-1).astype(kv.dtype)
    return write_rows(kv, new_rows, (slots // page_size, offset // packing, offset % packing))


def _mla_query(config: ModelConfig, dims: MLADims, params: LayerParams, x: jax.Array) -> jax.Array:
    """float32[rows, heads, qk_head_dim]."""
    if dims.q_lora_rank is not None:
        x = rms_norm(linear(x, params["q_a"]), params["q_a_norm"], config.rms_norm_eps)
    return linear(x, params["q"]).reshape(-1, config.num_attention_heads, dims.qk_head_dim)


def _per_head(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [rows, heads, in] times weight [heads, out, in]: [rows, heads, out]."""
    return jnp.einsum("rhi,hoi->rho", x, weight, precision=jax.lax.Precision.HIGHEST)
