"""What config.json fields mean, which models are refused, and KV sizes before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_jax_hicache.engine.memory_pool import (
    MHATokenToKVPool,
    MLATokenToKVPool,
    build_kv_pool,
)
from sgl_jax_hicache.engine.model_config import (
    LayerKind,
    ModelError,
    config_from_dict,
    config_from_file,
)
from sgl_jax_hicache.engine.weights import PRESET_NAMES, read_config

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def test_defaults_are_those_of_hugging_face() -> None:
    config = config_from_dict(BASE)
    assert config.head_dim == 16
    assert config.rope_theta == 10000.0
    assert config.layer_kinds == (LayerKind.FULL,) * 3
    assert not config.tie_word_embeddings
    assert not config.qk_norm
    assert config_from_dict({**BASE, "model_type": "qwen3"}).qk_norm
    qwen2 = config_from_dict({**BASE, "model_type": "qwen2"})
    assert (qwen2.qkv_bias, qwen2.output_bias) == (True, False)
    nested = {**BASE, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}
    assert config_from_dict(nested).rope_theta == 7.0
    unused_window = {**BASE, "sliding_window": 64, "use_sliding_window": False}
    assert config_from_dict(unused_window).layer_kinds == (LayerKind.FULL,) * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding"),
        ({"layer_types": ["linear_attention"] * 3}, "recurrent"),
        ({"layer_types": ["full_attention"]}, "1 entries for 3 layers"),
        ({"layer_types": ["odd"] * 3}, "odd"),
        ({"sliding_window": 64}, "sliding"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "llama3"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "bias"),
        ({"num_experts": 8}, "experts"),
        ({"n_routed_experts": 8, "first_k_dense_replace": 1}, "experts"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": 0}, "at least one layer"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
    fields = {k: v for k, v in {**BASE, **change}.items() if v is not None}
    with pytest.raises(ModelError, match=message):
        config_from_dict(fields)


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        config_from_file(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="not a JSON object"):
        config_from_file(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="lacks"):
        config_from_file(tmp_path / "config.json")


@pytest.mark.parametrize("name", PRESET_NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pools_hold_what_the_config_announces(name: str, dtype: str) -> None:
    config = read_config(f"random:{name}:0")
    pool = build_kv_pool(config, size=64, page_size=16, dtype=dtype)
    assert pool.buffer_bytes() == config.kv_bytes_per_token(dtype) * (64 + 16)
    assert len(pool.kv_buffer) == pool.layer_num == config.num_layers
    for buffer in pool.kv_buffer:
        assert buffer.shape == pool.buffer_shape
        assert buffer.dtype == pool.dtype


def test_row_layouts() -> None:
    def shape(pool: MHATokenToKVPool | MLATokenToKVPool) -> tuple[int, ...]:
        return pool.kv_buffer[0].shape

    assert shape(MHATokenToKVPool(64, 16, "float32", 3, 64, 1)) == (5, 16, 6, 1, 64)
    assert shape(MHATokenToKVPool(64, 16, "bfloat16", 3, 64, 1)) == (5, 16, 3, 2, 64)
    assert shape(MLATokenToKVPool(64, 16, "float32", 32, 16, 1)) == (5, 16, 1, 48)
    assert shape(MLATokenToKVPool(64, 16, "bfloat16", 32, 16, 1)) == (5, 8, 2, 48)
    assert shape(MLATokenToKVPool(6, 3, "bfloat16", 32, 16, 1)) == (3, 2, 2, 48)
    with pytest.raises(ValueError, match="multiple of the page size"):
        MHATokenToKVPool(60, 16, "float32", 3, 64, 1)
    with pytest.raises(ModelError, match="float8"):
        MHATokenToKVPool(64, 16, "float8", 3, 64, 1)


def test_clear_keeps_the_list_and_zeroes_it() -> None:
    pool = MHATokenToKVPool(64, 16, "float32", 1, 8, 2)
    the_list = pool.kv_buffer
    pool.kv_buffer[0] = pool.kv_buffer[0] + 1
    pool.clear()
    assert pool.kv_buffer is the_list
    assert not any(np.array(buffer).any() for buffer in pool.kv_buffer)
