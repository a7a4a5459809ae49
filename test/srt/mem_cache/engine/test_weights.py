"""Where models come from: specs, GGUF and safetensors files, random weights, and what names their version."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from dense_reference import dense_logprobs
from runner_harness import Harness, all_logprobs
from safetensors.numpy import save_file

from sgl_jax_hicache import who_computes
from sgl_jax_hicache.engine.model_config import ModelConfig, ModelError, config_from_dict
from sgl_jax_hicache.engine.weights import load_model, read_config
from sgl_jax_hicache.engine.weights.fingerprint import (
    TensorBytes,
    model_version,
    serving_version,
)
from sgl_jax_hicache.engine.weights.gguf_file import GGUFFile, gguf_name, unpermute_rope_rows
from sgl_jax_hicache.engine.weights.gguf_header import read_gguf
from sgl_jax_hicache.engine.weights.random_weights import RandomTensors, preset_config

FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "eos_token_id": [257],
}


def tensors_of(config: ModelConfig, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    source = RandomTensors(config, seed)
    return {name: source(name) for name in source.names()}


def write_directory(path: Path, fields: dict[str, Any], seed: int = 1) -> dict[str, Any]:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields))
    tensors = tensors_of(config_from_dict(fields), seed)
    names = list(tensors)
    half = len(names) // 2
    save_file({n: tensors[n] for n in names[:half]}, path / "model-1-of-2.safetensors")
    save_file({n: tensors[n] for n in names[half:]}, path / "model-2-of-2.safetensors")
    (path / "tokenizer.json").write_text(_tokenizer_json())
    return tensors


def _tokenizer_json() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    return str(fast.to_str())


def logprobs_of(spec: str, ids: list[int]) -> np.ndarray[Any, Any]:
    model = load_model(spec)
    h = Harness(model.config, model.params, size=256, max_context_len=256, tiles=(32,))
    vocab = model.config.vocab_size
    return all_logprobs(h.extend(h.new(64, idx=0), ids, top_logprobs_num=vocab), 0)


VARIANTS = {
    "llama": {},
    "llama with biases": {"attention_bias": True},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_safetensors_directory_computes_what_its_tensors_say(
    tmp_path: Path, variant: str
) -> None:
    fields = {**FIELDS, **VARIANTS[variant]}
    tensors = write_directory(tmp_path, fields)
    ids = [5, 7, 200, 31, 7, 9, 250]
    got = logprobs_of(str(tmp_path), ids)
    want = dense_logprobs(config_from_dict(fields), tensors.__getitem__, ids)[-1]
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_mla_without_query_compression_and_with_halved_rope() -> None:
    fields = {
        **FIELDS,
        "model_type": "deepseek_v3",
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "q_lora_rank": None,
        "rope_interleave": False,
    }
    config = config_from_dict(fields)
    from sgl_jax_hicache.engine.weights.params import assemble

    source = RandomTensors(config, 2)
    h = Harness(config, assemble(config, source), size=256, max_context_len=256, tiles=(32,))
    ids = [1, 2, 3, 4, 200, 7]
    got = all_logprobs(h.extend(h.new(64, idx=0), ids, top_logprobs_num=300), 0)
    np.testing.assert_allclose(got, dense_logprobs(config, source, ids)[-1], atol=1e-4)


def test_bfloat16_checkpoints_are_read_as_stored(tmp_path: Path) -> None:
    write_directory(tmp_path, FIELDS)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    narrow = {
        name: t.astype(ml_dtypes.bfloat16)
        for name, t in tensors_of(config_from_dict(FIELDS), 1).items()
    }
    save_file(narrow, tmp_path / "model.safetensors")
    params = load_model(str(tmp_path)).params
    want = narrow["model.norm.weight"].astype(np.float32)
    np.testing.assert_array_equal(np.array(params.final_norm), want)


def permute_rope_rows(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What GGUF converters do to llama's q and k: row i of the first half goes next to row i of the second."""
    out = np.empty_like(weight)
    dim = len(weight) // heads
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = weight[head * dim + i]
            out[head * dim + 2 * i + 1] = weight[head * dim + dim // 2 + i]
    return out


def write_gguf(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(FIELDS["num_hidden_layers"])
    writer.add_context_length(FIELDS["max_position_embeddings"])
    writer.add_embedding_length(FIELDS["hidden_size"])
    writer.add_feed_forward_length(FIELDS["intermediate_size"])
    writer.add_head_count(FIELDS["num_attention_heads"])
    writer.add_head_count_kv(FIELDS["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(FIELDS["rms_norm_eps"])
    writer.add_rope_freq_base(FIELDS["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    pieces = [bytes([b]).decode("latin-1") for b in range(0x21, 0x7F)]
    pieces.append("ab")
    writer.add_token_list([*pieces, "<end>"])
    writer.add_token_types([1] * len(pieces) + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(pieces))
    for name, tensor in tensors.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0)
        stored = permute_rope_rows(tensor, heads) if heads else tensor
        writer.add_tensor(gguf_name(name), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_computes_what_its_tensors_say(tmp_path: Path) -> None:
    config = config_from_dict(FIELDS)
    tensors = tensors_of(config, 3)
    write_gguf(tmp_path / "m.gguf", tensors)
    file = GGUFFile(tmp_path / "m.gguf")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(file.tensor(name), tensor, err_msg=name)
    assert file.config.to_json() == {**config.to_json(), "eos_token_ids": (95,)} | {
        "rms_norm_eps": pytest.approx(1e-5)
    }
    ids = [5, 7, 200, 31, 7, 9, 250]
    want = dense_logprobs(config, tensors.__getitem__, ids)[-1]
    np.testing.assert_allclose(logprobs_of(str(tmp_path / "m.gguf"), ids), want, atol=1e-4)


def test_unpermuting_undoes_the_converter() -> None:
    weight = np.random.default_rng(0).standard_normal((3 * 16, 5))
    assert not np.array_equal(permute_rope_rows(weight, 3), weight)
    np.testing.assert_array_equal(unpermute_rope_rows(permute_rope_rows(weight, 3), 3), weight)


def test_the_gguf_header_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tensors_of(config_from_dict(FIELDS), 3))
    header, theirs = read_gguf(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    for key, value in header.fields.items():
        assert theirs.fields[key].contents() == value
    assert set(header.tensors) == {t.name for t in theirs.tensors}
    for tensor in theirs.tensors:
        np.testing.assert_array_equal(header.tensors[tensor.name].data, tensor.data)


@pytest.mark.parametrize("keep", [0, 3, 20, 400, -40])
def test_a_short_gguf_file_is_refused(tmp_path: Path, keep: int) -> None:
    write_gguf(tmp_path / "m.gguf", tensors_of(config_from_dict(FIELDS), 3))
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "short.gguf").write_bytes(data[:keep])
    with pytest.raises(ModelError, match=r"short\.gguf"):
        load_model(str(tmp_path / "short.gguf"))


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    tensors = write_directory(tmp_path, FIELDS)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    save_file({n: t for n, t in tensors.items() if "o_proj" not in n}, tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match=r"o_proj\.weight"):
        load_model(str(tmp_path))
    save_file({**tensors, "model.norm.weight": np.ones(3, np.float32)}, tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight.*\(3,\)"):
        load_model(str(tmp_path))


def test_configs_are_readable_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    config = read_config(str(tmp_path))
    assert config.kv_bytes_per_token() == 2 * 2 * 2 * 16 * 4
    assert read_config(f"random:{tmp_path}:3") == config
    assert load_model(f"random:{tmp_path}:3").config == config
    with pytest.raises(ModelError, match="safetensors"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    "spec",
    ["nowhere/at/all", "random:tiny-mha", "random:tiny-mha:x", "random:no-such-preset:1", ""],
)
def test_specs_that_name_nothing_are_refused(spec: str) -> None:
    with pytest.raises(ModelError):
        read_config(spec)


def version_of(**tensors: np.ndarray[Any, Any]) -> str:
    return model_version(
        TensorBytes(name, t.shape, t.dtype.name, t.reshape(-1).view(np.uint8))
        for name, t in tensors.items()
    )


def test_one_differing_weight_makes_another_version() -> None:
    weight = np.random.default_rng(0).standard_normal((300, 400)).astype(np.float32)
    base = version_of(a=weight, b=weight)
    for index in np.random.default_rng(1).integers(0, weight.size, 20):
        changed = weight.copy()
        changed.reshape(-1)[index] += 1e-3
        assert version_of(a=changed, b=weight) != base
        assert version_of(a=weight, b=changed) != version_of(a=changed, b=weight)


def test_versions_tell_names_shapes_and_dtypes_apart() -> None:
    weight = np.zeros((4, 6), np.float32)
    versions = [
        version_of(a=weight),
        version_of(b=weight),
        version_of(a=weight.reshape(6, 4)),
        version_of(a=weight.view(np.int32)),
        version_of(a=weight, b=weight),
    ]
    assert len(set(versions)) == len(versions)
    assert version_of(a=weight, b=weight + 1) == version_of(b=weight + 1, a=weight)


def test_large_tensors_are_sampled_over_their_whole_length() -> None:
    data = np.zeros(40 << 20, np.uint8)
    base = model_version([TensorBytes("a", data.shape, "uint8", data)])
    for place in (0, data.size - 1):
        changed = data.copy()
        changed[place] = 1
        assert model_version([TensorBytes("a", data.shape, "uint8", changed)]) != base
    trained = data.copy()
    trained[:: 8 << 10] = 1  # a fine-tune moves weights everywhere
    assert model_version([TensorBytes("a", data.shape, "uint8", trained)]) != base


def test_checkpoints_of_one_shape_have_their_own_versions(tmp_path: Path) -> None:
    write_directory(tmp_path / "one", FIELDS, seed=1)
    write_directory(tmp_path / "two", FIELDS, seed=2)
    write_directory(tmp_path / "one again", FIELDS, seed=1)
    one, two, again = (
        load_model(str(tmp_path / name)).model_version for name in ("one", "two", "one again")
    )
    assert one == again != two


def test_random_versions_name_config_and_seed() -> None:
    specs = [f"random:{name}:{seed}" for name in ("tiny-mha", "tiny-gqa") for seed in (1, 2)]
    versions = [load_model(spec).model_version for spec in specs]
    assert len(set(versions)) == 4
    assert load_model(specs[0]).model_version == versions[0]


def test_random_tensors_do_not_depend_on_the_order_of_reading() -> None:
    config = preset_config("tiny-gqa")
    first, second = RandomTensors(config, 4), RandomTensors(config, 4)
    names = first.names()
    forward = {name: first(name) for name in names}
    for name in reversed(names):
        np.testing.assert_array_equal(second(name), forward[name])
    with pytest.raises(KeyError):
        first("no.such.tensor")


def test_one_retrained_embedding_row_changes_the_version() -> None:
    rows = np.zeros((49152, 144), np.float32)
    before = model_version(
        [TensorBytes("embed", rows.shape, "float32", rows.reshape(-1).view(np.uint8))]
    )
    rows[31_415] += 1e-6
    after = model_version(
        [TensorBytes("embed", rows.shape, "float32", rows.reshape(-1).view(np.uint8))]
    )
    assert before != after


def test_the_same_weights_with_another_config_or_platform_are_another_version() -> None:
    config = read_config("random:tiny-gqa:0")
    other = replace(config, rope_theta=config.rope_theta * 50)
    versions = {
        serving_version("weights", config, "cpu"),
        serving_version("weights", other, "cpu"),
        serving_version("weights", config, "tpu"),
        serving_version("other weights", config, "cpu"),
    }
    assert len(versions) == 4
    loaded = load_model("random:tiny-gqa:0").model_version
    assert loaded == load_model("random:tiny-gqa:0").model_version
    assert loaded != load_model("random:tiny-gqa:1").model_version


def _cpuinfo(folder: Path, text: str) -> Path:
    path = folder / "cpuinfo"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda patch, path: patch.setattr(jax, "__version__", "0.0.1"),
        lambda patch, path: patch.setattr(who_computes.metadata, "version", lambda name: "0.0.1"),
        lambda patch, path: patch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=SSE4_2"),
        lambda patch, path: patch.setattr(
            who_computes, "_CPUINFO", _cpuinfo(path, "processor: 0\nflags : fpu sse2 avx\n")
        ),
        lambda patch, path: jax.config.update("jax_default_matmul_precision", "highest"),
    ],
    ids=["jax", "jaxlib", "flags", "processor", "precision"],
)
def test_whoever_computes_otherwise_has_another_version(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch, Path], None],
) -> None:
    """Without fused multiply-add (`SSE4_2`) every page of a prompt differs in its last bits."""
    precision = jax.config.jax_default_matmul_precision
    before = load_model("random:tiny-gqa:0").model_version
    try:
        change(monkeypatch, tmp_path)
        assert load_model("random:tiny-gqa:0").model_version != before
    finally:
        jax.config.update("jax_default_matmul_precision", precision)


def test_only_instruction_sets_that_compute_tell_processors_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def computes(text: str) -> str:
        monkeypatch.setattr(who_computes, "_CPUINFO", _cpuinfo(tmp_path, text))
        return who_computes.who_computes()

    plain = computes("flags\t\t: vme avx2 fma md_clear\n")
    assert plain == computes("flags\t\t: fma avx2\n")
    assert plain != computes("flags\t\t: avx2\n")
    assert plain != computes("Features\t: fp asimd\n")
