"""Text to token ids and back, for streaming too.

Every token stands for a run of bytes, and text is those bytes as UTF-8. So a character split over several tokens is
held back until it is complete, and no text is ever taken back once it has been sent.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from .chat_template import ChatTemplate
from .model_config import ModelConfig, ModelError

_CONTROL_TOKEN, _USER_TOKEN = 3, 4  # GGUF token types
_MAX_SHRINKAGE = 4  # a normalizer that composes characters leaves at least this part of the bytes


class Vocabulary(Protocol):
    """What a tokenizer is built from."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens written out in it count as themselves."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for an id that a model's padded vocabulary adds."""

    def is_special(self, token_id: int) -> bool:
        """True for tokens that mark structure and are not shown."""

    @property
    def max_token_bytes(self) -> int:
        """Most bytes of text that one token can stand for."""


class Tokenizer:
    """A vocabulary, its end tokens and its chat template. Safe to share between threads."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        chat_template: ChatTemplate,
        bos_token_ids: Sequence[int] = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._bos_token_ids = list(bos_token_ids)
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Token ids of `text`, after the start token where the model wants one."""
        bos = self._bos_token_ids if add_bos else []
        return bos + self._vocabulary.encode(text)

    @property
    def max_token_bytes(self) -> int:
        """Most bytes of text that one token can stand for: a text has at least its bytes over this many tokens."""
        return self._vocabulary.max_token_bytes

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation (dictionaries with role and content), ready for the assistant's turn."""
        return self.encode(self.chat_template.render(messages), add_bos=False)

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of complete `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        detokenizer = IncrementalDetokenizer(self, skip_special=skip_special)
        return "".join(detokenizer.push(token_id) for token_id in token_ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        return self._vocabulary.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """True for tokens that mark structure and are not shown."""
        return self._vocabulary.is_special(token_id)


class IncrementalDetokenizer:
    """Turns one request's tokens into text as they come. One instance per request, one thread at a time."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is still partial."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never became complete."""
        return self._decoder.decode(b"", final=True)


class _ByteVocabulary:
    """Ids 0-255 are bytes, 256 starts and 257 ends; what a model has beyond shows as <id>."""

    FIRST_SPECIAL, END, FIRST_EXTRA = 256, 257, 258

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < self.FIRST_EXTRA:
            raise ModelError(
                f"a byte tokenizer needs a vocabulary of {self.FIRST_EXTRA} or more, not {vocab_size}"
            )
        self._vocab_size = vocab_size

    @property
    def max_token_bytes(self) -> int:
        return 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self._vocab_size:
            raise ModelError(f"token id {token_id} outside [0, {self._vocab_size})")
        return bytes([token_id]) if token_id < self.FIRST_SPECIAL else f"<{token_id}>".encode()

    def is_special(self, token_id: int) -> bool:
        return self.FIRST_SPECIAL <= token_id < self.FIRST_EXTRA


class _PieceVocabulary:
    """A vocabulary of the `tokenizers` library whose pieces are known to stand for fixed bytes."""

    def __init__(
        self, fast: FastTokenizer, piece_bytes: Callable[[str], bytes], special_ids: Iterable[int]
    ) -> None:
        self._fast = fast
        self._special_ids = frozenset(special_ids)
        added = set(fast.get_added_tokens_decoder())
        self._bytes = {
            token_id: piece.encode() if token_id in added else piece_bytes(piece)
            for piece, token_id in fast.get_vocab(with_added_tokens=True).items()
        }
        longest = max(len(token) for token in self._bytes.values())
        self._max_token_bytes = longest * (_MAX_SHRINKAGE if fast.normalizer is not None else 1)

    @property
    def max_token_bytes(self) -> int:
        return self._max_token_bytes

    def encode(self, text: str) -> list[int]:
        # The batch call lets other threads run meanwhile; `encode` would keep the interpreter to itself.
        (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    def token_bytes(self, token_id: int) -> bytes:
        # Models pad their vocabulary: an id beyond the tokenizer's can be sampled, and stands for nothing.
        return self._bytes.get(token_id, b"")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids


def byte_tokenizer(vocab_size: int, eos_token_ids: Sequence[int] = ()) -> Tokenizer:
    """The tokenizer of random models: one token per byte."""
    eos = eos_token_ids or (_ByteVocabulary.END,)
    return Tokenizer(_ByteVocabulary(vocab_size), vocab_size, eos, ChatTemplate.plain())


def tokenizer_from_gguf(field: Callable[..., Any]) -> Tokenizer:
    """Builds the byte-level BPE that GGUF metadata describes; `field(name, default)` reads one value.

    Raises ModelError for other kinds of tokenizers.
    """
    kind, split = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or split not in _PRE_TOKENIZERS:
        raise ModelError(
            f"GGUF tokenizer {kind!r} with splitting {split!r} is not supported; "
            f"known: gpt2 with {sorted(_PRE_TOKENIZERS)}"
        )
    tokens = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"the GGUF tokenizer is inconsistent: {error}") from error
    fast.pre_tokenizer = _PRE_TOKENIZERS[split]()
    fast.decoder = decoders.ByteLevel()
    types = field("tokenizer.ggml.token_type")
    special_ids = [index for index, kind in enumerate(types) if kind == _CONTROL_TOKEN]
    fast.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i in special_ids]
    )
    fast.add_tokens(
        [AddedToken(tokens[i], normalized=False) for i, t in enumerate(types) if t == _USER_TOKEN]
    )
    bos = field("tokenizer.ggml.bos_token_id")
    eos = [
        i
        for i in (field("tokenizer.ggml.eos_token_id"), vocab.get("<|endoftext|>"))
        if i is not None
    ]
    template = field("tokenizer.chat_template")
    return Tokenizer(
        _PieceVocabulary(fast, _byte_level_bytes, special_ids),
        len(tokens),
        list(dict.fromkeys(eos)),
        ChatTemplate(template) if template else ChatTemplate.plain(),
        [bos] if bos is not None and field("tokenizer.ggml.add_bos_token", False) else [],
    )


def _smollm_split() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _gpt2_split() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {"smollm": _smollm_split, "gpt-2": _gpt2_split}


def tokenizer_from_directory(path: Path, config: ModelConfig) -> Tokenizer:
    """The tokenizer of a Hugging Face directory: tokenizer.json, with tokenizer_config.json if there is one."""
    file = path / "tokenizer.json"
    try:
        text = file.read_text(encoding="utf-8")
        fast = FastTokenizer.from_str(text)
        described = json.loads(text)
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise ModelError(f"cannot read the tokenizer {file}: {error}") from error
    settings = _optional_json(path / "tokenizer_config.json")
    special_ids = [i for i, token in fast.get_added_tokens_decoder().items() if token.special]
    template = settings.get("chat_template")
    if (path / "chat_template.jinja").is_file():
        template = (path / "chat_template.jinja").read_text(encoding="utf-8")
    bos = _token_text(settings.get("bos_token"))
    eos = list(config.eos_token_ids)
    named_eos = fast.token_to_id(_token_text(settings.get("eos_token")))
    if named_eos is not None and named_eos not in eos:
        eos.append(named_eos)
    bos_id = fast.token_to_id(bos) if settings.get("add_bos_token") else None
    return Tokenizer(
        _PieceVocabulary(fast, _piece_bytes_of(described), special_ids),
        fast.get_vocab_size(with_added_tokens=True),
        eos,
        ChatTemplate(template, bos) if isinstance(template, str) else ChatTemplate.plain(),
        [] if bos_id is None else [bos_id],
    )


def _optional_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    return loaded if isinstance(loaded, dict) else {}


def _token_text(value: Any) -> str:
    """The text of a special token, which config files write as a string or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _piece_bytes_of(described: Mapping[str, Any]) -> Callable[[str], bytes]:
    """How a tokenizer.json spells bytes: the GPT-2 alphabet, or '▁' with <0xNN> for single bytes."""
    decoder = json.dumps(described.get("decoder"))
    if '"ByteLevel"' in decoder:
        return _byte_level_bytes
    if '"ByteFallback"' in decoder:
        return _byte_fallback_bytes
    raise ModelError("only byte-level and byte-fallback tokenizers are supported")


def _byte_alphabet() -> dict[str, int]:
    """The GPT-2 alphabet: printable bytes stand for themselves, the rest for code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(shifted)})
    return alphabet


_BYTE_OF_CHARACTER = _byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    if not all(character in _BYTE_OF_CHARACTER for character in piece):
        return piece.encode()
    return bytes(_BYTE_OF_CHARACTER[character] for character in piece)


def _byte_fallback_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()
