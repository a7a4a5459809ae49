"""What config.json fields mean, which models are refused, and KV sizes before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_jax_hicache.engine.forward_batch import SamplingParams
from sgl_jax_hicache.engine.layer_kinds import RecurrentDims
from sgl_jax_hicache.engine.memory_pool import (
    MHATokenToKVPool,
    MLATokenToKVPool,
    RecurrentStatePool,
    build_recurrent_pool,
)
from sgl_jax_hicache.engine.model_config import (
    LayerKind,
    ModelError,
    config_from_dict,
    config_from_file,
)
from sgl_jax_hicache.engine.req import GenerateRequest, Req
from sgl_jax_hicache.engine.req_to_token_pool import HybridReqToTokenPool
from sgl_jax_hicache.engine.swa_kv_pool import SWAKVPool, build_kv_pool, layer_buffers
from sgl_jax_hicache.engine.weights import PRESET_NAMES, read_config
from sgl_jax_hicache.engine.weights.fingerprint import serving_version
from sgl_jax_hicache.engine.weights.random_weights import random_version

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
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
MIXED = {
    "layer_types": ["linear_attention", "sliding_attention", "kda_attention"],
    "sliding_window": 40,
}
LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
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


def test_layer_kinds_and_their_sizes() -> None:
    config = config_from_dict({**BASE, **LINEAR, **MIXED})
    assert config.layer_kinds == (LayerKind.RECURRENT, LayerKind.SLIDING, LayerKind.RECURRENT)
    assert (config.attention_layers, config.recurrent_layers) == ((1,), (0, 2))
    assert config.sliding_window == 40
    assert config.recurrent == RecurrentDims(4, 2, 8, 12, 4, channel_decay_layers=(2,))
    assert config.kv_bytes_per_token() == 1 * 2 * 2 * 16 * 4
    channels = 2 * 2 * 8 + 4 * 12
    assert config.state_bytes_per_request() == 2 * 4 * (4 * 8 * 12 + channels * 3)
    assert not config.is_full_attention
    windowed = config_from_dict({**BASE, "sliding_window": 8, "max_window_layers": 1})
    assert windowed.layer_kinds == (LayerKind.FULL, LayerKind.SLIDING, LayerKind.SLIDING)
    unused = config_from_dict({**BASE, "sliding_window": 8, "layer_types": ["full_attention"] * 3})
    assert unused == config_from_dict(BASE)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 41},
        {"linear_key_head_dim": 9},
        {"layer_types": ["kda_attention", "sliding_attention", "linear_attention"]},
    ],
)
def test_versions_of_random_and_of_stored_weights_name_layer_kinds(change: dict[str, Any]) -> None:
    fields = {**BASE, **LINEAR, **MIXED}
    one, other = config_from_dict(fields), config_from_dict({**fields, **change})
    assert random_version(one, 0) != random_version(other, 0)
    assert serving_version("abc", one, "cpu") != serving_version("abc", other, "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "lacks"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "lacks"),
        ({**LINEAR, "layer_types": ["linear_attention"] * 3}, "recurrent layers alone"),
        ({**LINEAR, **MIXED, "linear_num_key_heads": 3}, "3 key heads"),
        ({**LINEAR, **MIXED, "linear_conv_kernel_dim": 1}, "convolution of 2 or more"),
        ({**MIXED, "linear_num_value_heads": 4}, "lacks 'linear_num_key_heads'"),
        ({"layer_types": ["full_attention"]}, "1 entries for 3 layers"),
        ({"layer_types": ["odd"] * 3}, "odd"),
        ({"sliding_window": 0}, "window of 1 or more"),
        ({"model_type": "deepseek_v3", **LATENT, "sliding_window": 8}, "latent attention"),
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
    pool = build_kv_pool(config, size=64, swa_size=32, page_size=16, dtype=dtype)
    kinds = config.layer_kinds
    assert isinstance(pool, SWAKVPool) == (LayerKind.SLIDING in kinds)
    full, sizes = pool, {LayerKind.FULL: 64 + 16, LayerKind.SLIDING: 32 + 16}
    if isinstance(pool, SWAKVPool):
        assert not hasattr(pool, "kv_buffer")
        assert (pool.size, pool.size_swa) == (64, 32)
        assert pool.full_to_swa_index_mapping.tolist() == [0] * (64 + 16)
        full = pool.full_kv_pool
    assert pool.buffer_bytes() == sum(
        config.kv_bytes_per_token(dtype, (kind,)) * size for kind, size in sizes.items()
    )
    assert len(full.kv_buffer) == full.layer_num == kinds.count(LayerKind.FULL)
    places = layer_buffers(pool, config)
    assert tuple(places) == config.attention_layers
    for layer, place in places.items():
        kept = pool
        if isinstance(pool, SWAKVPool):
            kept = pool.swa_kv_pool if kinds[layer] is LayerKind.SLIDING else pool.full_kv_pool
        assert place.buffers is kept.kv_buffer
        assert place.is_swa == (kinds[layer] is LayerKind.SLIDING)
        assert place.buffers[place.place].shape == kept.buffer_shape
        assert place.buffers[place.place].dtype == kept.dtype
    assert len({(id(place.buffers), place.place) for place in places.values()}) == len(places)
    states = build_recurrent_pool(config, 3)
    assert (states is None) == (config.recurrent is None)
    if states is not None:
        assert states.buffer_bytes() == config.state_bytes_per_request() * (3 + 1)


def test_the_state_pool_has_a_dummy_slot_and_one_conv_buffer_a_layer() -> None:
    pool = RecurrentStatePool(5, RecurrentDims(4, 2, 8, 12, 4), layer_num=2)
    assert [buffer.shape for buffer in pool.recurrent_buffers] == [(6, 4, 8, 12)] * 2
    assert [[b.shape for b in layer] for layer in pool.conv_buffers] == [[(6, 80, 3)]] * 2
    lists = pool.recurrent_buffers, pool.conv_buffers
    pool.recurrent_buffers[1] = pool.recurrent_buffers[1] + 1
    pool.conv_buffers[0][0] = pool.conv_buffers[0][0] + 1
    pool.clear()
    assert pool.recurrent_buffers is lists[0] and pool.conv_buffers is lists[1]
    assert not np.array(pool.recurrent_buffers[1]).any()
    assert not np.array(pool.conv_buffers[0][0]).any()
    with pytest.raises(ValueError, match="slots and layers"):
        RecurrentStatePool(0, RecurrentDims(4, 2, 8, 12, 4), layer_num=2)


def test_state_slots_are_handed_out_once() -> None:
    rows = HybridReqToTokenPool(2, 64, recurrent_slots=2)
    first, second = rows.alloc_recurrent_slot(), rows.alloc_recurrent_slot()
    assert {first, second} == {1, 2}
    assert rows.alloc_recurrent_slot() is None
    rows.free_recurrent_slot(1)
    for slot in (1, 0, 3):
        with pytest.raises(ValueError, match="not in use"):
            rows.free_recurrent_slot(slot)
    rows.clear()
    assert rows.recurrent_available_size() == 2
    with pytest.raises(ValueError, match="too few"):
        HybridReqToTokenPool(3, 64, recurrent_slots=2)


@pytest.mark.parametrize("track_slots", [0, 1, 2])
def test_a_request_takes_all_its_state_slots_or_none(track_slots: int) -> None:
    owned = 1 + track_slots
    rows = HybridReqToTokenPool(2, 64, 2 * owned + 1, track_slots)
    assert (rows.request_owned_slots, rows.slots_per_rank) == (owned, 2 * owned + 1)
    kept = rows.alloc_recurrent_slot()
    holders = [Req(GenerateRequest(str(i), (1,), SamplingParams(), print, 0.0)) for i in range(3)]
    assert [rows.alloc_states(req) for req in holders] == [True, True, False]
    listed = [
        [req.recurrent_pool_idx, *req.recurrent_ping_pong_track_buffer] for req in holders[:2]
    ]
    assert sorted([kept, *listed[0], *listed[1]]) == list(range(1, 2 * owned + 2))
    assert rows.recurrent_available_size() == 0
    assert (holders[2].recurrent_pool_idx, holders[2].recurrent_ping_pong_track_buffer) == (0, [])
    rows.free_states(holders[0])
    rows.free_states(holders[0])  # it lists none any more
    assert rows.recurrent_available_size() == owned
    assert rows.alloc_states(holders[2])


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
