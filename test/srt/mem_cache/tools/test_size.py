"""`size`: its sums against the pools that the engine really builds, and configs of many kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tool_kit import Tools

from sgl_jax.srt.mem_cache.hicache.device_buffers import DeviceBuffers
from sgl_jax.srt.mem_cache.hicache.pool_buffers import component_buffers
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind
from sgl_jax_hicache.engine.device_pools import build_device_pools
from sgl_jax_hicache.engine.engine_args import EngineArgs
from sgl_jax_hicache.engine.model_spec import PRESET_NAMES
from sgl_jax_hicache.engine.pool_sizes import pool_sizes
from sgl_jax_hicache.engine.weights.random_weights import preset_config
from sgl_jax_hicache.tools.kv_shape import HeadsKV, KVShape, LatentKV, StateShape, shape_of_fields

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
STATE = 4 * 64 * 32
CONV = (2 * 2 * 64 + 4 * 32) * 3

CONFIGS: dict[str, tuple[dict[str, Any], KVShape]] = {
    "gqa": ({}, KVShape(HeadsKV(4, 2, 64), max_tokens=8192)),
    "mha without head_dim": (
        {"num_key_value_heads": None, "head_dim": None},
        KVShape(HeadsKV(4, 8, 32), max_tokens=8192),
    ),
    "mla": (
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
        KVShape(LatentKV(4, 512, 64), max_tokens=8192),
    ),
    "layer types": (
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 128},
        KVShape(HeadsKV(2, 2, 64), HeadsKV(2, 2, 64), 128, max_tokens=8192),
    ),
    "every second layer full": (
        {"sliding_window": 128, "sliding_window_pattern": 2},
        KVShape(HeadsKV(2, 2, 64), HeadsKV(2, 2, 64), 128, max_tokens=8192),
    ),
    "all layers slide": (
        {"sliding_window": 128},
        KVShape(None, HeadsKV(4, 2, 64), 128, max_tokens=8192),
    ),
    "the last layers slide": (
        {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 3},
        KVShape(HeadsKV(3, 2, 64), HeadsKV(1, 2, 64), 128, max_tokens=8192),
    ),
    "a window that is switched off": (
        {"sliding_window": 128, "use_sliding_window": False},
        KVShape(HeadsKV(4, 2, 64), max_tokens=8192),
    ),
    "sliding layers of their own size": (
        {
            **{"hybrid_layer_pattern": [0, 1, 1, 0], "sliding_window_size": 128},
            **{"swa_num_key_value_heads": 4, "swa_head_dim": 192},
        },
        KVShape(HeadsKV(2, 2, 64), HeadsKV(2, 4, 192), 128, max_tokens=8192),
    ),
    "full layers of their own size": (
        {
            **{"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 64},
            **{"num_global_key_value_heads": 1, "global_head_dim": 512},
        },
        KVShape(HeadsKV(1, 1, 512), HeadsKV(3, 2, 64), 64, max_tokens=8192),
    ),
    "every fourth layer attends": (
        {"full_attention_interval": 4, **LINEAR},
        KVShape(HeadsKV(1, 2, 64), state=StateShape(3, STATE, CONV), max_tokens=8192),
    ),
    "kda beside mla": (
        {
            **{"kv_lora_rank": 128, "qk_rope_head_dim": 64},
            "linear_attn_config": {
                **{"kda_layers": [1, 2, 3], "full_attn_layers": [4]},
                **{"num_heads": 2, "head_dim": 128, "short_conv_kernel_size": 4},
            },
        },
        KVShape(
            LatentKV(1, 128, 64),
            state=StateShape(3, 2 * 128 * 128, 3 * 256 * 3),
            max_tokens=8192,
        ),
    ),
    "lightning beside mla": (
        {"kv_lora_rank": 128, "qk_rope_head_dim": 64, "layer_group_size": 4},
        KVShape(LatentKV(1, 128, 64), state=StateShape(3, 8 * 64 * 64, 0), max_tokens=8192),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_of_many_kinds(name: str) -> None:
    fields, shape = CONFIGS[name]
    assert shape_of_fields({**LLAMA, **fields}) == shape


@pytest.mark.parametrize("preset", PRESET_NAMES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_sums_are_those_of_the_pools_that_are_built(
    tools: Tools, preset: str, page_size: int
) -> None:
    args = EngineArgs(
        model_path=f"random:{preset}:0",
        page_size=page_size,
        max_total_tokens=1024,
        max_running_requests=2,
        chunked_prefill_size=64,
    )
    config = preset_config(preset)
    sizes = pool_sizes(args, config)
    pools = build_device_pools(
        config,
        sizes,
        page_size=page_size,
        dtype=args.dtype,
        max_running_requests=2,
        context_len=1024,
    )
    found = component_buffers(pools.kv, pools.states)
    ran = tools.run(
        *("size", "--model-path", preset, "--hbm", "1GiB", "--page-size", str(page_size)),
        *("--max-running", "2"),
    )
    components = ran.data["components"]
    assert set(components) == {kind.value for kind in found}
    for kind, refs in found.items():
        page_bytes = DeviceBuffers(refs, 1).layout(kind, page_size).page_bytes
        assert components[kind.value]["page_bytes"] == page_bytes
    if ComponentKind.RECURRENT in found:
        assert ran.data["l1"]["pages"]["recurrent"] == sizes.states
        assert ran.data["request_states"] == 2 * (1 + sizes.track_slots)


def write(folder: Path, fields: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**LLAMA, **fields}))
    return path


def test_a_worked_example(tools: Tools, tmp_path: Path) -> None:
    """By hand: 4 layers x keys and values x 2 heads x 128 (64, rounded up) x 2 bytes = 4096 bytes a token."""
    path = write(tmp_path, {})
    data = tools.run(
        *(
            "size",
            "--model-path",
            str(path),
            "--hbm",
            "1GiB",
            "--weights",
            "512MiB",
            "--mem-fraction",
            "0.75",
        ),
        *("--page-size", "64", "--storage", "10GiB", "--context", "4096"),
    ).data
    assert data["components"]["full"] == {"page_bytes": 64 * 4096, "bytes_per_token": 4096.0}
    assert data["cache_bytes"] == 256 * 2**20
    assert data["l1"]["pages"]["full"] == 1024 - 1  # one is for padding
    assert data["l2"]["pages"]["full"] == 2 * 1023
    assert data["l2"]["bytes"] == 2 * 1023 * 64 * 4096
    assert data["l3"]["bytes_per_token"] == pytest.approx(4096 + 960 / 64, abs=1)
    assert data["l3"]["prompts"] == pytest.approx(10 * 2**30 / (4096 + 15) / 4096, rel=1e-3)
    embedded = tools.run(
        "size", "--model-path", str(path), "--hbm", "1GiB", "--engine", "embedded"
    ).data
    assert embedded["components"]["full"]["bytes_per_token"] == 2048.0


def test_several_devices(tools: Tools, tmp_path: Path) -> None:
    """Heads are divided, and repeated if there are too few; a latent is kept by every device."""

    def per_token(fields: dict[str, Any], devices: int) -> float:
        ran = tools.run(
            *("size", "--model-path", str(write(tmp_path, fields)), "--hbm", "1GiB"),
            *("--devices", str(devices), "--engine", "embedded"),
        )
        return float(ran.data["components"]["full"]["bytes_per_token"])

    assert per_token({}, 1) == per_token({}, 2) == per_token({}, 4) / 2
    mla = {"kv_lora_rank": 128, "qk_rope_head_dim": 64}
    assert per_token(mla, 4) == 4 * per_token(mla, 1)


def test_weights_are_found_beside_the_config(tools: Tools, tmp_path: Path) -> None:
    write(tmp_path, {})
    with (tmp_path / "model-1.safetensors").open("wb") as file:
        file.truncate(100 << 20)
    data = tools.run("size", "--model-path", str(tmp_path), "--hbm", "1GiB").data
    assert data["weight_bytes"] == 100 << 20
    (tmp_path / "model-1.safetensors").unlink()
    ran = tools.run("size", "--model-path", str(tmp_path), "--hbm", "1GiB", as_json=False)
    assert "give --weights" in ran.out


def test_host_memory_gives_the_ratio(tools: Tools, tmp_path: Path) -> None:
    write(tmp_path, {})
    argv = ("size", "--model-path", str(tmp_path), "--hbm", "1GiB", "--host")
    for host in ("100MiB", "1GiB", "64GiB"):
        data = tools.run(*argv, host).data
        limit = {"100MiB": 100 << 20, "1GiB": 1 << 30, "64GiB": 64 << 30}[host]
        assert 0.97 * limit < data["l2"]["bytes"] <= limit
    assert tools.run(*argv, "1KiB").status == 2
    assert "not both" in tools.run(*argv, "1GiB", "--hicache-ratio", "2").err


def test_windows_and_states_are_shown_with_their_interval(tools: Tools) -> None:
    ran = tools.run("size", "--model-path", "tiny-hybrid", "--hbm", "64MiB", as_json=False)
    assert ran.status == 0
    for text in (
        "sliding windows",
        "recurrent states",
        "window 40",
        "are kept every",
        "running requests",
    ):
        assert text in ran.out
    given = ("--hicache-checkpoint-interval", "640")
    data = tools.run("size", "--model-path", "tiny-hybrid", "--hbm", "64MiB", *given).data
    assert data["checkpoint_interval"] == 640
    assert data["l2"]["pages"]["recurrent"] == pytest.approx(
        data["l2"]["pages"]["full"] * 1.25 / 10, abs=1
    )


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), "required"),
        (("--model-path", "tiny-gqa"), "--hbm"),
        (("--model-path", "tiny-gqa", "--hbm", "lots"), "--hbm 'lots'"),
        (("--model-path", "tiny-gqa", "--hbm", "1KiB"), "not even one page fits"),
        (("--model-path", "nothing", "--hbm", "1GiB"), "no such model"),
        (("--model-path", "/nowhere/m.gguf", "--hbm", "1GiB"), "/nowhere/m.gguf"),
        (("--model-path", "tiny-gqa", "--hbm", "1GiB", "--page-size", "0"), "--page-size"),
        (("--model-path", "tiny-gqa", "--hbm", "1GiB", "--mem-fraction", "1.5"), "--mem-fraction"),
        (("--model-path", "tiny-gqa", "--hbm", "1GiB", "--hicache-ratio", "-1"), "--hicache-ratio"),
        (
            ("--model-path", "tiny-gqa", "--hbm", "1GiB", "--hicache-ratio", "nan"),
            "--hicache-ratio",
        ),
        (
            ("--model-path", "tiny-swa", "--hbm", "1GiB", "--hicache-checkpoint-interval", "5"),
            "multiple",
        ),
    ],
)
def test_a_wrong_question_ends_with_2_and_one_line(
    tools: Tools, argv: tuple[str, ...], expected: str
) -> None:
    ran = tools.run("size", *argv)
    assert ran.status == 2
    assert expected in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "cannot read"),
        ("[]", "not a JSON object"),
        ("{}", "lacks 'num_hidden_layers'"),
        ('{"num_hidden_layers": "many"}', "not understood"),
        ('{"num_hidden_layers": 1, "layer_types": ["mystery"]}', "mystery"),
        ('{"num_hidden_layers": 2, "layer_types": ["full_attention"]}', "1 kinds of layers for 2"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(
    tools: Tools, tmp_path: Path, text: str, expected: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    ran = tools.run("size", "--model-path", str(tmp_path), "--hbm", "1GiB")
    assert ran.status == 2
    assert expected in ran.err


def test_nested_text_configs_are_read(tools: Tools, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "text_config": LLAMA}))
    assert tools.run("size", "--model-path", str(tmp_path), "--hbm", "1GiB").status == 0
