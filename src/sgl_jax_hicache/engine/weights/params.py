"""From named checkpoint tensors to the arrays that the decoder computes with.

Every source (safetensors, GGUF, random) yields tensors under Hugging Face names; this module alone knows how they are
fused. Weights stay [out, in].
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from ..layers.decoder_layer import LayerParams
from ..model_config import LayerKind, MLADims, ModelConfig
from .recurrent_params import recurrent_params
from .tensor_reader import Tensor, TensorReader, TensorSource


@dataclass(frozen=True)
class ModelParams:
    """All arrays of a model, float32. `lm_head` is `embed` itself where the two are tied.

    embed, lm_head: [vocab, hidden]; final_norm: [hidden]; layers: one dictionary per layer.
    """

    embed: jax.Array
    layers: tuple[LayerParams, ...]
    final_norm: jax.Array
    lm_head: jax.Array


def assemble(config: ModelConfig, source: TensorSource) -> ModelParams:
    """Builds the parameters. Raises ModelError if a tensor is missing or has another shape than `config` says."""
    reader = TensorReader(source)
    embed = reader.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = tuple(
        {name: _to_device(value) for name, value in _layer(config, reader, index).items()}
        for index in range(config.num_layers)
    )
    device_embed = _to_device(embed)
    head = device_embed
    if not config.tie_word_embeddings:
        head = _to_device(reader.take("lm_head.weight", config.vocab_size, config.hidden_size))
    final_norm = _to_device(reader.take("model.norm.weight", config.hidden_size))
    return ModelParams(embed=device_embed, layers=layers, final_norm=final_norm, lm_head=head)


def _to_device(values: Tensor) -> jax.Array:
    """Puts an array that nobody else changes onto the first device, by name (see `_PagedKVPool.clear`)."""
    placed: jax.Array = jax.device_put(values, jax.devices()[0])
    return placed


def _layer(config: ModelConfig, reader: TensorReader, index: int) -> dict[str, Tensor]:
    if config.layer_kinds[index] is LayerKind.RECURRENT:
        mixer = recurrent_params(config, reader, index)
        return {**mixer, **_norms_and_mlp(config, reader, index)}
    return (_mha_layer if config.mla is None else _mla_layer)(config, reader, index)


def _mha_layer(config: ModelConfig, reader: TensorReader, index: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{index}.self_attn."
    hidden, dim = config.hidden_size, config.head_dim
    sizes = {
        "q_proj": config.num_attention_heads * dim,
        "k_proj": config.num_kv_heads * dim,
        "v_proj": config.num_kv_heads * dim,
    }
    weights = [reader.take(f"{prefix}{name}.weight", n, hidden) for name, n in sizes.items()]
    out_width = config.num_attention_heads * dim
    params: dict[str, Tensor] = {
        "qkv": np.concatenate(weights),
        "o": reader.take(f"{prefix}o_proj.weight", hidden, out_width),
        **_norms_and_mlp(config, reader, index),
    }
    if config.qkv_bias:
        biases = [reader.take(f"{prefix}{name}.bias", n) for name, n in sizes.items()]
        params["qkv_bias"] = np.concatenate(biases)
    if config.output_bias:
        params["o_bias"] = reader.take(f"{prefix}o_proj.bias", hidden)
    if config.qk_norm:
        params["q_norm"] = reader.take(f"{prefix}q_norm.weight", dim)
        params["k_norm"] = reader.take(f"{prefix}k_norm.weight", dim)
    return params


def _mla_layer(config: ModelConfig, reader: TensorReader, index: int) -> dict[str, Tensor]:
    if config.mla is None:
        raise ValueError("latent attention needs MLA sizes")
    dims, heads, hidden = config.mla, config.num_attention_heads, config.hidden_size
    prefix = f"model.layers.{index}.self_attn."
    kv_a = reader.take(f"{prefix}kv_a_proj_with_mqa.weight", dims.latent_dim, hidden)
    up_dim = dims.qk_nope_head_dim + dims.v_head_dim
    kv_b = reader.take(f"{prefix}kv_b_proj.weight", heads * up_dim, dims.kv_lora_rank)
    per_head = kv_b.reshape(heads, up_dim, dims.kv_lora_rank)
    value_width = heads * dims.v_head_dim
    if config.rope_interleaved:
        kv_a = _halve_rope_rows(kv_a, dims.qk_rope_head_dim)
    return {
        **_mla_query(config, dims, reader, prefix),
        "kv_a": kv_a,
        "kv_a_norm": reader.take(f"{prefix}kv_a_layernorm.weight", dims.kv_lora_rank),
        "key_up": np.ascontiguousarray(per_head[:, : dims.qk_nope_head_dim].swapaxes(1, 2)),
        "value_up": np.ascontiguousarray(per_head[:, dims.qk_nope_head_dim :]),
        "o": reader.take(f"{prefix}o_proj.weight", hidden, value_width),
        **_norms_and_mlp(config, reader, index),
    }


def _mla_query(
    config: ModelConfig, dims: MLADims, reader: TensorReader, prefix: str
) -> dict[str, Tensor]:
    width = config.num_attention_heads * dims.qk_head_dim
    params: dict[str, Tensor] = {}
    if dims.q_lora_rank is None:
        q = reader.take(f"{prefix}q_proj.weight", width, config.hidden_size)
    else:
        rank = dims.q_lora_rank
        params["q_a"] = reader.take(f"{prefix}q_a_proj.weight", rank, config.hidden_size)
        params["q_a_norm"] = reader.take(f"{prefix}q_a_layernorm.weight", rank)
        q = reader.take(f"{prefix}q_b_proj.weight", width, rank)
    if config.rope_interleaved:
        per_head = q.reshape(config.num_attention_heads, dims.qk_head_dim, -1)
        q = _halve_rope_rows(per_head, dims.qk_rope_head_dim).reshape(q.shape)
    params["q"] = q
    return params


def _norms_and_mlp(config: ModelConfig, reader: TensorReader, index: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{index}."
    hidden, inner = config.hidden_size, config.intermediate_size
    gate = reader.take(f"{prefix}mlp.gate_proj.weight", inner, hidden)
    up = reader.take(f"{prefix}mlp.up_proj.weight", inner, hidden)
    return {
        "input_norm": reader.take(f"{prefix}input_layernorm.weight", hidden),
        "post_norm": reader.take(f"{prefix}post_attention_layernorm.weight", hidden),
        "gate_up": np.concatenate([gate, up]),
        "down": reader.take(f"{prefix}mlp.down_proj.weight", hidden, inner),
    }


def _halve_rope_rows(weight: Tensor, rope_dim: int) -> Tensor:
    """Reorders the last `rope_dim` output rows (axis -2) from pairs (x0, y0, x1, y1, ..) to halves (x.., y..)."""
    keep, rope = weight[..., :-rope_dim, :], weight[..., -rope_dim:, :]
    halves = np.concatenate([rope[..., 0::2, :], rope[..., 1::2, :]], axis=-2)
    return np.concatenate([keep, halves], axis=-2)
