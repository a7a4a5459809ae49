"""Random weights from a seed, and the tiny models that tests and demos name.

The scales are chosen so that outputs say something about the cache: attention is sharp and its output outweighs the
residual stream, hence a greedy continuation depends on every part of the prefix and wrong KV shows as other tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import numpy as np

from ..model_config import LayerKind, ModelConfig, config_from_dict
from .recurrent_params import recurrent_shapes
from .tensor_reader import Tensor

_QUERY_GAIN = 3.0
_OUTPUT_GAIN = 2.0
_HEAD_GAIN = 3.0
# log(exp(dt) - 1) of the mean step: a head then forgets about 2 % a token, so that distant tokens still count.
_MEAN_DECAY_BIAS = -4.0

_TINY = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "eos_token_id": 257,
}
_PRESETS: dict[str, dict[str, object]] = {
    "tiny-mha": {
        **_TINY,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
    "tiny-gqa": {
        **_TINY,
        "model_type": "qwen3",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "tiny-mla": {
        **_TINY,
        "model_type": "deepseek_v3",
        "num_attention_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
    },
}
_GQA = {**_PRESETS["tiny-gqa"], "sliding_window": 40}
_DELTA = {
    **_GQA,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
_PRESETS |= {
    "tiny-swa": {
        **_GQA,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "tiny-swa-only": {**_GQA, "layer_types": ["sliding_attention"] * 3},
    "tiny-recurrent": {
        **_DELTA,
        "layer_types": ["linear_attention", "kda_attention", "full_attention"],
    },
    "tiny-hybrid": {
        **_DELTA,
        "num_hidden_layers": 4,
        "layer_types": [
            "linear_attention",
            "sliding_attention",
            "kda_attention",
            "full_attention",
        ],
    },
}
PRESET_NAMES = tuple(_PRESETS)


def preset_config(name: str) -> ModelConfig:
    """The config of a tiny model in PRESET_NAMES."""
    return config_from_dict(_PRESETS[name])


def random_version(config: ModelConfig, seed: int) -> str:
    """The model version of random weights: a digest of everything they are made from."""
    text = json.dumps([config.to_json(), seed, "random-weights-v1"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class RandomTensors:
    """Tensors under Hugging Face names; each depends only on the config, the seed and its own name."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._seed = seed
        self._shapes = dict(_named_shapes(config))

    def __call__(self, name: str) -> Tensor:
        """float32 values for `name`. Raises KeyError for a name that the config does not have."""
        shape = self._shapes[name]
        stream = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(stream[:16], "little"))
        values = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("A_log"):
            return 0.5 * values
        if name.endswith("dt_bias"):
            return _MEAN_DECAY_BIAS + values
        if len(shape) == 1:
            is_bias = name.endswith(".bias")
            return 0.1 * values + np.float32(0.0 if is_bias else 1.0)
        return values * np.float32(_gain(name) / np.sqrt(np.prod(shape[1:])))

    def names(self) -> list[str]:
        """All tensor names, in checkpoint order."""
        return list(self._shapes)


def _gain(name: str) -> float:
    if "embed_tokens" in name:
        return 10.0
    if "q_proj" in name or "q_b_proj" in name:
        return _QUERY_GAIN
    if "o_proj" in name or "out_proj" in name:
        return _OUTPUT_GAIN
    return _HEAD_GAIN if "lm_head" in name else 1.0


def _named_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        for name, shape in _mixer_shapes(config, index):
            yield prefix + name, shape
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}mlp.gate_proj.weight", (config.intermediate_size, hidden)
        yield f"{prefix}mlp.up_proj.weight", (config.intermediate_size, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, config.intermediate_size)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _mixer_shapes(config: ModelConfig, index: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if config.layer_kinds[index] is LayerKind.RECURRENT:
        yield from recurrent_shapes(config, index).items()
        return
    attention = _mha_shapes(config) if config.mla is None else _mla_shapes(config)
    for name, shape in attention:
        yield f"self_attn.{name}", shape


def _mha_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, dim = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * dim, config.num_kv_heads * dim
    for name, width in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        yield f"{name}.weight", (width, hidden)
        if config.qkv_bias:
            yield f"{name}.bias", (width,)
    yield "o_proj.weight", (hidden, q)
    if config.output_bias:
        yield "o_proj.bias", (hidden,)
    if config.qk_norm:
        yield "q_norm.weight", (dim,)
        yield "k_norm.weight", (dim,)


def _mla_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    if config.mla is None:
        raise ValueError("latent attention needs MLA sizes")
    dims, hidden, heads = config.mla, config.hidden_size, config.num_attention_heads
    width = heads * dims.qk_head_dim
    if dims.q_lora_rank is None:
        yield "q_proj.weight", (width, hidden)
    else:
        yield "q_a_proj.weight", (dims.q_lora_rank, hidden)
        yield "q_a_layernorm.weight", (dims.q_lora_rank,)
        yield "q_b_proj.weight", (width, dims.q_lora_rank)
    up_width = heads * (dims.qk_nope_head_dim + dims.v_head_dim)
    yield "kv_a_proj_with_mqa.weight", (dims.latent_dim, hidden)
    yield "kv_a_layernorm.weight", (dims.kv_lora_rank,)
    yield "kv_b_proj.weight", (up_width, dims.kv_lora_rank)
    yield "o_proj.weight", (hidden, heads * dims.v_head_dim)
