"""Text to tokens and back: bytes, byte-level BPE, byte fallback, streaming, and chat prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from sgl_jax_hicache.engine.chat_template import ChatTemplate
from sgl_jax_hicache.engine.model_config import ModelError
from sgl_jax_hicache.engine.tokenizer import (
    IncrementalDetokenizer,
    Tokenizer,
    byte_tokenizer,
    tokenizer_from_directory,
    tokenizer_from_gguf,
)
from sgl_jax_hicache.engine.weights import read_config

TEXTS = [
    "",
    "The quick brown fox.",
    "  two  spaces\n\n\ttabs ",
    "In 2024, 1234567890 + 42",
    "naïve café — Grüße, 你好, мир",
    "👩‍👩‍👧‍👦 family and 🇩🇪 flag",
    "\x00\x7f ¡¢ \u00ad soft",
]
CONFIG = read_config("random:tiny-mha:0")


def gguf_fields() -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "Ġt", "he", "12"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["Ġ t", "h e", "1 2"],
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def gguf_tokenizer(**changes: Any) -> Tokenizer:
    fields = {**gguf_fields(), **changes}
    return tokenizer_from_gguf(lambda name, default=None: fields.get(name, default))


def fallback_tokenizer(path: Path) -> Tokenizer:
    """A SentencePiece-like tokenizer.json: spaces as '▁', unknown characters as <0xNN>."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {
        "▁": 256,
        "he": 257,
        "h": 258,
        "e": 259,
    }
    model = models.BPE(vocab=vocab, merges=[("h", "e")], byte_fallback=True)
    fast = FastTokenizer(model)
    fast.normalizer = normalizers.Replace(" ", "▁")
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    fast.save(str(path / "tokenizer.json"))
    return tokenizer_from_directory(path, CONFIG)


def all_tokenizers(path: Path) -> dict[str, Tokenizer]:
    return {
        "bytes": byte_tokenizer(300),
        "gguf": gguf_tokenizer(),
        "fallback": fallback_tokenizer(path),
    }


@pytest.mark.parametrize("kind", ["bytes", "gguf", "fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_whole_and_streamed(tmp_path: Path, kind: str, text: str) -> None:
    tokenizer = all_tokenizers(tmp_path)[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = IncrementalDetokenizer(tokenizer)
    parts = [stream.push(token_id) for token_id in ids] + [stream.flush()]
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_partial_characters_are_held_back() -> None:
    tokenizer = byte_tokenizer(300)
    stream = IncrementalDetokenizer(tokenizer)
    parts = [stream.push(byte) for byte in "a€b".encode()]
    assert parts == ["a", "", "", "€", "b"]
    cut = IncrementalDetokenizer(tokenizer)
    assert [cut.push(byte) for byte in "€".encode()[:2]] == ["", ""]
    assert cut.flush() == "\ufffd"
    broken = IncrementalDetokenizer(tokenizer)
    assert broken.push(0xE2) + broken.push(ord("x")) == "\ufffdx"


def test_digits_stay_single() -> None:
    tokenizer = gguf_tokenizer()
    pieces = [tokenizer.token_bytes(i) for i in tokenizer.encode("x 12 the")]
    assert pieces == [b"x", b" ", b"1", b"2", b" t", b"he"]


def test_special_tokens_are_found_in_text_and_hidden_in_output() -> None:
    tokenizer = gguf_tokenizer()
    ids = tokenizer.encode("<|im_start|>he<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "he"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>he<|im_end|>"
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.is_special(2)


def test_a_start_token_is_added_where_the_model_wants_one() -> None:
    plain, started = gguf_tokenizer(), gguf_tokenizer(**{"tokenizer.ggml.add_bos_token": True})
    assert started.encode("he") == [1, *plain.encode("he")]
    assert started.encode("he", add_bos=False) == plain.encode("he")


def test_unknown_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="llama"):
        gguf_tokenizer(**{"tokenizer.ggml.model": "llama"})
    with pytest.raises(ModelError, match="inconsistent"):
        gguf_tokenizer(**{"tokenizer.ggml.merges": ["q zz"]})
    with pytest.raises(ModelError, match="odd"):
        gguf_tokenizer(**{"tokenizer.ggml.pre": "odd"})
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        tokenizer_from_directory(tmp_path, CONFIG)
    with pytest.raises(ModelError, match="258"):
        byte_tokenizer(100)


def test_byte_tokenizers_show_extra_ids_and_refuse_foreign_ones() -> None:
    tokenizer = byte_tokenizer(300)
    assert tokenizer.decode([104, 105, 299]) == "hi<299>"
    assert tokenizer.decode([256, 104, 257]) == "h"
    for token_id in (-1, 300):
        with pytest.raises(ModelError, match="outside"):
            tokenizer.token_bytes(token_id)


def test_a_directory_brings_template_end_and_start_tokens(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={p: i for i, p in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<s>", "</s>"])
    fast.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "add_bos_token": True,
        "chat_template": "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = tokenizer_from_directory(tmp_path, CONFIG)
    assert tokenizer.encode("a")[0] == 256
    assert tokenizer.eos_token_ids == (257,)
    ids = tokenizer.encode_chat([{"role": "user", "content": "hey"}])
    assert tokenizer.decode(ids, skip_special=False) == "<s>[hey]"


def test_templates_are_sandboxed_and_refusals_are_value_errors() -> None:
    with pytest.raises(ModelError, match="does not parse"):
        ChatTemplate("{% for %}")
    message = [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match="no system"):
        ChatTemplate("{{ raise_exception('no system') }}").render(message)
    with pytest.raises(ValueError, match="refused"):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}").render(message)
    plain = ChatTemplate.plain().render([*message, {"role": "assistant", "content": "y"}])
    assert plain == "user: x\nassistant: y\nassistant:"


def test_no_token_stands_for_more_bytes_than_it_says(tmp_path: Path) -> None:
    assert byte_tokenizer(300).max_token_bytes == 1
    # <|endoftext|> is the longest; a normalizer may shorten the text before it is cut.
    assert gguf_tokenizer().max_token_bytes == len("<|endoftext|>")
    for tokenizer in (byte_tokenizer(300), gguf_tokenizer(), fallback_tokenizer(tmp_path)):
        for text in (*TEXTS, "<|endoftext|>" * 9, "e\u0301" * 50):
            num_bytes = len(text.encode())
            assert num_bytes <= tokenizer.max_token_bytes * len(tokenizer.encode(text))
