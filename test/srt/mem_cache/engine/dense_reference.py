"""A second, independent decoder: dense causal attention over the whole sequence, in float64 numpy, from HF tensors.

No pages, no blocks, no absorbed projections, and MLA's rope rotates neighbouring pairs as its checkpoints mean it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sgl_jax_hicache.engine.model_config import ModelConfig

Array = np.ndarray[Any, Any]


def dense_logprobs(
    config: ModelConfig, tensor: Callable[[str], Array], token_ids: Sequence[int], last: int = 0
) -> Array:
    """Log probabilities [tokens, vocab] of the next token after each prefix, or after the `last` longest ones."""

    def get(name: str) -> Array:
        return np.asarray(tensor(name), np.float64)

    x = get("model.embed_tokens.weight")[np.asarray(token_ids)]
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."

        def layer(name: str, prefix: str = prefix) -> Array:
            return get(prefix + name)

        normed = _norm(config, x, layer("input_layernorm.weight"))
        attention = _gqa if config.mla is None else _mla
        x = x + attention(config, layer, normed)
        normed = _norm(config, x, layer("post_attention_layernorm.weight"))
        gate, up = normed @ layer("mlp.gate_proj.weight").T, normed @ layer("mlp.up_proj.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer("mlp.down_proj.weight").T
    x, tied = x[-last:], config.tie_word_embeddings
    head = get("model.embed_tokens.weight" if tied else "lm_head.weight")
    logits = _norm(config, x, get("model.norm.weight")) @ head.T
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _norm(config: ModelConfig, x: Array, weight: Array) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weight


def _angles(config: ModelConfig, length: int, dim: int) -> Array:
    return np.outer(np.arange(length), config.rope_theta ** (-np.arange(0, dim, 2) / dim))


def _rotate(config: ModelConfig, x: Array, pairs: bool) -> Array:
    """Rotates x [tokens, heads, dim], as complex numbers made of pairs or of halves."""
    dim = x.shape[-1]
    a, b = (x[..., 0::2], x[..., 1::2]) if pairs else (x[..., : dim // 2], x[..., dim // 2 :])
    turned = (a + 1j * b) * np.exp(1j * _angles(config, len(x), dim))[:, None]
    return np.concatenate([turned.real, turned.imag], -1)


def _softmax_mix(q: Array, k: Array, v: Array, scale: float) -> Array:
    """Causal attention of [tokens, heads, dim] arrays, one key and value head per query head."""
    scores = np.einsum("qhd,khd->hqk", q, k) * scale
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)


def _gqa(config: ModelConfig, layer: Callable[[str], Array], x: Array) -> Array:
    def project(name: str, heads: int) -> Array:
        y = x @ layer(f"self_attn.{name}_proj.weight").T
        if config.qkv_bias:
            y = y + layer(f"self_attn.{name}_proj.bias")
        return y.reshape(len(x), heads, config.head_dim)

    q, k = project("q", config.num_attention_heads), project("k", config.num_kv_heads)
    v = project("v", config.num_kv_heads)
    if config.qk_norm:
        q = _norm(config, q, layer("self_attn.q_norm.weight"))
        k = _norm(config, k, layer("self_attn.k_norm.weight"))
    q, k = _rotate(config, q, False), _rotate(config, k, False)
    group = config.num_attention_heads // config.num_kv_heads
    k, v = k.repeat(group, 1), v.repeat(group, 1)
    out = _softmax_mix(q, k, v, config.head_dim**-0.5) @ layer("self_attn.o_proj.weight").T
    return out + layer("self_attn.o_proj.bias") if config.output_bias else out


def _mla(config: ModelConfig, layer: Callable[[str], Array], x: Array) -> Array:
    dims, heads = config.mla, config.num_attention_heads
    assert dims is not None
    q = x
    if dims.q_lora_rank is not None:
        q = q @ layer("self_attn.q_a_proj.weight").T
        q = _norm(config, q, layer("self_attn.q_a_layernorm.weight"))
    name = "q_proj" if dims.q_lora_rank is None else "q_b_proj"
    q = (q @ layer(f"self_attn.{name}.weight").T).reshape(len(x), heads, dims.qk_head_dim)
    down = x @ layer("self_attn.kv_a_proj_with_mqa.weight").T
    latent = _norm(config, down[:, : dims.kv_lora_rank], layer("self_attn.kv_a_layernorm.weight"))
    up = (latent @ layer("self_attn.kv_b_proj.weight").T).reshape(len(x), heads, -1)
    k_nope, v = up[..., : dims.qk_nope_head_dim], up[..., dims.qk_nope_head_dim :]
    pairs = config.rope_interleaved
    k_rope = _rotate(config, down[:, None, dims.kv_lora_rank :], pairs).repeat(heads, 1)
    q_rope = _rotate(config, q[..., dims.qk_nope_head_dim :], pairs)
    q = np.concatenate([q[..., : dims.qk_nope_head_dim], q_rope], -1)
    k = np.concatenate([k_nope, k_rope], -1)
    return _softmax_mix(q, k, v, dims.qk_head_dim**-0.5) @ layer("self_attn.o_proj.weight").T
