"""A second, independent decoder: dense causal attention over the whole sequence, in float64 numpy, from HF tensors.

No pages, no blocks, no absorbed projections, and MLA's rope rotates neighbouring pairs as its checkpoints mean it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from sgl_jax_hicache.engine.model_config import LayerKind, ModelConfig

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
        x = x + _mixer(config, index)(config, layer, normed)
        normed = _norm(config, x, layer("post_attention_layernorm.weight"))
        gate, up = normed @ layer("mlp.gate_proj.weight").T, normed @ layer("mlp.up_proj.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer("mlp.down_proj.weight").T
    x, tied = x[-last:], config.tie_word_embeddings
    head = get("model.embed_tokens.weight" if tied else "lm_head.weight")
    logits = _norm(config, x, get("model.norm.weight")) @ head.T
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _mixer(config: ModelConfig, index: int) -> Callable[..., Array]:
    kind = config.layer_kinds[index]
    if kind is LayerKind.RECURRENT:
        assert config.recurrent is not None
        return _kda if index in config.recurrent.channel_decay_layers else _delta_net
    if kind is LayerKind.SLIDING:
        return partial(_gqa, window=config.sliding_window)
    return _gqa if config.mla is None else _mla


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


def _softmax_mix(q: Array, k: Array, v: Array, scale: float, window: int | None = None) -> Array:
    """Causal attention of [tokens, heads, dim] arrays, one key and value head per query head."""
    scores = np.einsum("qhd,khd->hqk", q, k) * scale
    ages = np.arange(len(q))[:, None] - np.arange(len(q))[None, :]
    scores = np.where((ages >= 0) & (ages < (window or len(q))), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)


def _gqa(
    config: ModelConfig, layer: Callable[[str], Array], x: Array, window: int | None = None
) -> Array:
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
    mixed = _softmax_mix(q, k, v, config.head_dim**-0.5, window)
    out = mixed @ layer("self_attn.o_proj.weight").T
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


def delta_recurrence(
    q: Array, k: Array, v: Array, beta: Array, log_decay: Array, state: Array
) -> tuple[Array, Array]:
    """The gated delta rule token by token: (o [tokens, heads, v_dim], the last state).

    q, k: [tokens, heads, k_dim]; v: [tokens, heads, v_dim]; beta: [tokens, heads]; log_decay: [tokens, heads, 1 or
    k_dim]; state: [heads, k_dim, v_dim].
    """
    state, outs = state.copy(), []
    for t in range(len(q)):
        for h in range(q.shape[1]):
            s = state[h] * np.exp(log_decay[t, h])[:, None]
            error = v[t, h] - s.T @ k[t, h]
            state[h] = s + np.outer(k[t, h], beta[t, h] * error)
        outs.append(np.einsum("hk,hkv->hv", q[t], state))
    return np.stack(outs), state


def _delta_net(config: ModelConfig, layer: Callable[[str], Array], x: Array) -> Array:
    """Gated DeltaNet: one decay per head, silu gate."""
    dims = config.recurrent
    assert dims is not None
    taps = layer("linear_attn.conv1d.weight")[:, 0]
    mixed = _causal_conv(x @ layer("linear_attn.in_proj_qkv.weight").T, taps)
    step = _softplus(x @ layer("linear_attn.in_proj_a.weight").T + layer("linear_attn.dt_bias"))
    log_decay = (-np.exp(layer("linear_attn.A_log")) * step)[..., None]
    beta = _sigmoid(x @ layer("linear_attn.in_proj_b.weight").T)
    gate = x @ layer("linear_attn.in_proj_z.weight").T
    out = _delta_heads(config, mixed, beta, log_decay, layer("linear_attn.norm.weight"))
    return (out * gate * _sigmoid(gate)) @ layer("linear_attn.out_proj.weight").T


def _kda(config: ModelConfig, layer: Callable[[str], Array], x: Array) -> Array:
    """Kimi Delta Attention: one decay per key channel, sigmoid gate."""
    dims = config.recurrent
    assert dims is not None

    def project(*names: str) -> Array:
        y = x
        for name in names:
            y = y @ layer(f"self_attn.{name}_proj.weight").T
        return y

    parts = [_causal_conv(project(n), layer(f"self_attn.{n}_conv1d.weight")[:, 0]) for n in "qkv"]
    step = _softplus(project("f_a", "f_b") + layer("self_attn.dt_bias"))
    rate = np.exp(layer("self_attn.A_log")).reshape(1, -1, 1)
    log_decay = -rate * step.reshape(len(x), dims.num_value_heads, dims.key_dim)
    out = _delta_heads(
        config,
        np.concatenate(parts, -1),
        _sigmoid(project("b")),
        log_decay,
        layer("self_attn.o_norm.weight"),
    )
    return (out * _sigmoid(project("g_a", "g_b"))) @ layer("self_attn.o_proj.weight").T


def _delta_heads(
    config: ModelConfig, mixed: Array, beta: Array, log_decay: Array, norm: Array
) -> Array:
    """From convolved q, k, v to the normed heads, flattened."""
    dims = config.recurrent
    assert dims is not None
    q, k, v = np.split(mixed, [dims.keys_width, 2 * dims.keys_width], -1)
    group = dims.num_value_heads // dims.num_key_heads
    q, k = (
        (a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6)).repeat(group, 1)
        for a in (y.reshape(len(mixed), -1, dims.key_dim) for y in (q, k))
    )
    v = v.reshape(len(mixed), -1, dims.value_dim)
    start = np.zeros(dims.state_shape)
    out, _ = delta_recurrence(q / np.sqrt(dims.key_dim), k, v, beta, log_decay, start)
    return _norm(config, out, norm).reshape(len(mixed), -1)


def _causal_conv(x: Array, taps: Array) -> Array:
    """Each channel's own convolution over the last tokens, then silu. taps: [channels, kernel], newest last."""
    kernel = taps.shape[1]
    padded = np.concatenate([np.zeros((kernel - 1, x.shape[1])), x])
    y = np.stack([(padded[t : t + kernel] * taps.T).sum(0) for t in range(len(x))])
    return y * _sigmoid(y)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _softplus(x: Array) -> Array:
    return np.logaddexp(0.0, x)
