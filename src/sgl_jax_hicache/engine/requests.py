"""From what a client asks for to a request that the scheduler takes: every check of a request, in one place."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .forward_batch import SamplingParams
from .stop_strings import StopStringMatcher
from .tokenizer import Tokenizer

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_TOP_ENTRIES = 1 << 20
"""Likeliest tokens that one answer may list, over all its tokens: they are kept until it ends, 100 bytes each."""


class RequestError(ValueError):
    """A request that cannot be served as asked. `field` names what is wrong with it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True)
class GenerateSpec:
    """One prompt and how to continue it. Exactly one of `text` and `input_ids` is given.

    `add_bos`: `text` gets the model's start token; not so a rendered conversation, which has its own. `prompt_field`
    and `max_tokens_field` are what the client calls these fields, for messages.
    """

    text: str | None = None
    input_ids: Sequence[int] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    return_logprob: bool = False
    top_logprobs_num: int = 0
    extra_key: str | None = None
    stream: bool = False
    rid: str | None = None
    add_bos: bool = True
    prompt_field: str = "text"
    max_tokens_field: str = "max_new_tokens"


@dataclass(frozen=True)
class CheckedRequest:
    """A spec that can be served: tokens, parameters cut to what fits, and the matcher of its stop strings."""

    input_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_matcher: StopStringMatcher | None


class RequestChecker:
    """Tokenises and checks specs against one model and one pool. Any thread.

    `max_context_len`: tokens of the longest sequence; `pool_tokens`: token slots of the device pool.
    """

    def __init__(
        self, tokenizer: Tokenizer, max_context_len: int, pool_tokens: int, random_seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self._max_context_len = max_context_len
        self._pool_tokens = pool_tokens
        self._seeds = np.random.default_rng(random_seed)
        self._seeds_lock = threading.Lock()

    def check(self, spec: GenerateSpec) -> CheckedRequest:
        """Raises RequestError, naming the field, for whatever cannot be served."""
        _check_unicode(spec)
        _check_sampling(spec, self._tokenizer.vocab_size)
        input_ids = self._input_ids(spec)
        sampling = replace(
            spec.sampling,
            max_new_tokens=min(spec.sampling.max_new_tokens, self._room_for_output(len(input_ids))),
            seed=self._seed(spec.sampling),
        )
        _check_top_entries(spec, sampling.max_new_tokens)
        stops = spec.sampling.stop
        matcher = StopStringMatcher(self._tokenizer, stops) if stops else None
        return CheckedRequest(input_ids, sampling, matcher)

    def _input_ids(self, spec: GenerateSpec) -> tuple[int, ...]:
        if (spec.text is None) == (spec.input_ids is None):
            raise RequestError(spec.prompt_field, "give either text or input_ids")
        if spec.text is not None:
            self._check_bytes(spec, spec.text)
            encode = self._tokenizer.encode
            input_ids = tuple(encode(spec.text, add_bos=spec.add_bos)) if spec.text else ()
        else:
            input_ids = tuple(spec.input_ids or ())
        if not input_ids:
            raise RequestError(spec.prompt_field, "the prompt is empty; give at least one token")
        self._check_length(spec, len(input_ids))
        vocab_size = self._tokenizer.vocab_size
        if min(input_ids) < 0 or max(input_ids) >= vocab_size:
            wrong = next(token for token in input_ids if not 0 <= token < vocab_size)
            raise RequestError(spec.prompt_field, f"token id {wrong} is outside [0, {vocab_size})")
        return input_ids

    def _check_bytes(self, spec: GenerateSpec, text: str) -> None:
        """Refuses, without the seconds that tokenising takes, a text that no tokenizer could make short enough."""
        at_least = -(-len(text.encode()) // self._tokenizer.max_token_bytes)
        self._check_length(spec, at_least, "at least ")

    def _check_length(self, spec: GenerateSpec, prompt_len: int, about: str = "") -> None:
        found = f"the prompt has {about}{prompt_len} tokens"
        if prompt_len >= self._max_context_len:
            raise RequestError(
                spec.prompt_field,
                f"{found}; the context holds {self._max_context_len}, "
                "of which one is left for the answer",
            )
        if prompt_len > self._pool_tokens:
            raise RequestError(
                spec.prompt_field, f"{found}; the device pool holds {self._pool_tokens}"
            )

    def _room_for_output(self, prompt_len: int) -> int:
        # The last token's KV is never computed, so the pool holds one token less than the sequence.
        return min(self._max_context_len - prompt_len, self._pool_tokens + 1 - prompt_len)

    def _seed(self, sampling: SamplingParams) -> int | None:
        if sampling.seed is not None or sampling.temperature == 0:
            return sampling.seed
        with self._seeds_lock:
            return int(self._seeds.integers(0, 2**31))


def _check_unicode(spec: GenerateSpec) -> None:
    """Half surrogates come through JSON, but can be neither tokenised nor hashed nor sent back."""
    texts = [(spec.prompt_field, spec.text), ("rid", spec.rid), ("extra_key", spec.extra_key)]
    texts += [("stop", stop) for stop in spec.sampling.stop]
    for name, text in texts:
        try:
            (text or "").encode()
        except UnicodeEncodeError as error:
            raise RequestError(name, f"is not valid Unicode at character {error.start}") from None


def _check_sampling(spec: GenerateSpec, vocab_size: int) -> None:
    sampling = spec.sampling
    if sampling.max_new_tokens < 1:
        raise RequestError(spec.max_tokens_field, f"{sampling.max_new_tokens} is less than 1")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise RequestError("temperature", f"{sampling.temperature} is not a number of 0 or more")
    if not 0 < sampling.top_p <= 1:
        raise RequestError("top_p", f"{sampling.top_p} is outside (0, 1]")
    if sampling.top_k != -1 and sampling.top_k < 1:
        raise RequestError("top_k", f"{sampling.top_k} is neither -1 (all) nor 1 or more")
    if sampling.seed is not None and not 0 <= sampling.seed < 2**32:
        raise RequestError("seed", f"{sampling.seed} is outside [0, 2**32)")
    if len(sampling.stop) > MAX_STOPS:
        raise RequestError("stop", f"{len(sampling.stop)} strings; {MAX_STOPS} are allowed")
    if not all(sampling.stop):
        raise RequestError("stop", "an empty string would stop everything; remove it")
    if not 0 <= spec.top_logprobs_num <= vocab_size:
        raise RequestError(
            "top_logprobs_num", f"{spec.top_logprobs_num} is outside [0, {vocab_size}]"
        )
    if spec.top_logprobs_num and not spec.return_logprob:
        raise RequestError("top_logprobs_num", "needs return_logprob")


def _check_top_entries(spec: GenerateSpec, max_new_tokens: int) -> None:
    if spec.top_logprobs_num * max_new_tokens > MAX_TOP_ENTRIES:
        most = MAX_TOP_ENTRIES // max_new_tokens
        raise RequestError(
            "top_logprobs_num",
            f"{spec.top_logprobs_num} for each of up to {max_new_tokens} tokens are too many; "
            f"ask for {most} or less, or for fewer tokens",
        )
