"""The bodies that the routes take. An unknown field is an error, and nothing is converted silently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from sgl_jax.srt.mem_cache.hicache.byte_size import ALLOWED as ALLOWED_BYTES
from sgl_jax.srt.mem_cache.hicache.byte_size import parse_bytes

from ..forward_batch import SamplingParams
from ..requests import MAX_TOP_LOGPROBS, GenerateSpec, RequestError

# The type of errors whose message is ours, for people.
OWN_WORDS = "hicache"
Name = Annotated[str, Field(min_length=1, max_length=256)]
# Fail fast: of a body with a million wrong entries, the first is enough.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
MAX_PROMPTS = 64


def _few_prompts(given: object) -> object:
    """Before anything else looks at them: millions of prompts would hold up the server's loop."""
    many = isinstance(given, list) and len(given) > MAX_PROMPTS
    if isinstance(given, list) and many and not isinstance(given[0], int):
        raise PydanticCustomError(
            OWN_WORDS, f"{len(given)} prompts; {MAX_PROMPTS} are allowed at once"
        )
    return given


def _only_text(content: object) -> object:
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise PydanticCustomError(
                OWN_WORDS, "only text content is supported, not {kind}", {"kind": repr(kind[:80])}
            )
    return content


Prompts = Annotated[
    str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)],
    BeforeValidator(_few_prompts),
]
Stop = str | Texts | None
Unused = Annotated[float, Field(ge=0, le=0)]
_UNBOUNDED_TOKENS = 1 << 30  # cut to what context and pool hold

_CUT = Field(
    description="At most this many tokens. An answer ends earlier, with finish_reason `length`, "
    "where the context or the device pool is full."
)


class Strict(BaseModel):
    """No unknown fields, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True)


class SamplingBody(Strict):
    """`sampling_params` of /generate; the names and defaults of SamplingParams."""

    max_new_tokens: Annotated[int, _CUT] = SamplingParams.max_new_tokens
    temperature: float = SamplingParams.temperature
    top_p: float = SamplingParams.top_p
    top_k: int = SamplingParams.top_k
    seed: int | None = None
    stop: Stop = None
    stop_token_ids: TokenIds = []
    ignore_eos: bool = False

    def sampling(self) -> SamplingParams:
        """The record that the engine takes."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=stops(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


class GenerateBody(Strict):
    """POST /generate. `rid` and `extra_key` are for one prompt or for all of a list."""

    text: Annotated[str | Texts | None, BeforeValidator(_few_prompts)] = None
    input_ids: Annotated[
        TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)] | None,
        BeforeValidator(_few_prompts),
    ] = None
    sampling_params: SamplingBody = Field(default_factory=SamplingBody)
    return_logprob: bool = False
    top_logprobs_num: int = 0
    stream: bool = False
    extra_key: Name | None = None
    rid: Name | None = None

    @property
    def is_batch(self) -> bool:
        """True if the answer is a list."""
        given = self.text if self.text is not None else self.input_ids
        return isinstance(given, list) and (not given or not isinstance(given[0], int))

    def specs(self) -> list[GenerateSpec]:
        """One spec per prompt. Raises RequestError."""
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("text", "give exactly one of text and input_ids")
        field = "text" if self.text is not None else "input_ids"
        prompts = prompts_of(field, self.text if self.text is not None else self.input_ids)
        return [
            _spec(
                prompt,
                sampling=self.sampling_params.sampling(),
                return_logprob=self.return_logprob,
                top_logprobs_num=self.top_logprobs_num,
                extra_key=self.extra_key,
                stream=self.stream,
                rid=numbered(self.rid, index, len(prompts)),
                prompt_field=field,
                max_tokens_field="sampling_params.max_new_tokens",
            )
            for index, prompt in enumerate(prompts)
        ]


class StreamOptions(Strict):
    """`stream_options` of the OpenAI routes."""

    include_usage: bool = False


class OpenAIBody(Strict):
    """What both OpenAI routes share; `top_k` to `rid` are additions of this server."""

    model: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: Literal[1] = 1
    seed: int | None = None
    stop: Stop = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: Unused = 0
    frequency_penalty: Unused = 0
    user: str | None = None
    top_k: int = -1
    stop_token_ids: TokenIds = []
    ignore_eos: bool = False
    extra_key: Name | None = None
    rid: Name | None = None

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with its account."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        """The record that the engine takes."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=stops(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: Prompts
    max_tokens: Annotated[int, _CUT] = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    def specs(self) -> list[GenerateSpec]:
        """One spec per prompt. Raises RequestError."""
        prompts = prompts_of("prompt", self.prompt)
        return [
            _spec(
                prompt,
                sampling=self.sampling(self.max_tokens),
                return_logprob=self.logprobs is not None,
                top_logprobs_num=self.logprobs or 0,
                extra_key=self.extra_key,
                stream=self.stream,
                rid=numbered(self.rid, index, len(prompts)),
                prompt_field="prompt",
                max_tokens_field="max_tokens",
            )
            for index, prompt in enumerate(prompts)
        ]


class TextPart(Strict):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[
        str | Annotated[list[TextPart], Field(fail_fast=True)], BeforeValidator(_only_text)
    ]

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1), Field(fail_fast=True)]
    max_tokens: Annotated[int | None, _CUT] = None
    max_completion_tokens: Annotated[int | None, _CUT] = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    def specs(self, render: Callable[[list[dict[str, str]]], str]) -> list[GenerateSpec]:
        """The one spec; `render` writes the conversation as the model expects it. Raises RequestError."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs", "needs logprobs: true")
        field = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        wanted = self.max_tokens if field == "max_tokens" else self.max_completion_tokens
        try:
            text = render([message.plain() for message in self.messages])
        except ValueError as error:
            raise RequestError("messages", str(error)) from error
        return [
            _spec(
                text,
                add_bos=False,
                sampling=self.sampling(_UNBOUNDED_TOKENS if wanted is None else wanted),
                return_logprob=self.logprobs,
                top_logprobs_num=self.top_logprobs or 0,
                extra_key=self.extra_key,
                stream=self.stream,
                rid=self.rid,
                prompt_field="messages",
                max_tokens_field=field,
            )
        ]


class AbortBody(Strict):
    """POST /abort_request."""

    rid: Name


class AttachBody(Strict):
    """PUT /hicache/storage-backend. `max_bytes`: bound on the model's folder, as a number or as "500GiB"; 0: none."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    max_bytes: Annotated[int, Field(ge=0)] | Annotated[str, Field(max_length=64)] = 0

    def folder(self) -> Path:
        """The absolute path. Raises RequestError: a relative one would depend on where the server was started."""
        path = Path(self.path)
        if not path.is_absolute():
            raise RequestError("path", f"{self.path!r} is not an absolute path")
        return path

    def bound(self) -> int:
        """`max_bytes` as a number. Raises RequestError."""
        if isinstance(self.max_bytes, int):
            return self.max_bytes
        try:
            return parse_bytes(self.max_bytes)
        except ValueError as error:
            raise RequestError("max_bytes", f"give 0 for no bound, or {ALLOWED_BYTES}") from error


class WarmUpBody(Strict):
    """POST /hicache/warm_up: prompts to have in the cache. `extra_key` is for all of them."""

    text: Annotated[str | Texts | None, BeforeValidator(_few_prompts)] = None
    input_ids: Annotated[
        TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)] | None,
        BeforeValidator(_few_prompts),
    ] = None
    extra_key: Name | None = None

    def specs(self) -> list[GenerateSpec]:
        """One spec per prompt. Raises RequestError."""
        prompts = GenerateBody(
            text=self.text,
            input_ids=self.input_ids,
            extra_key=self.extra_key,
            sampling_params=SamplingBody(max_new_tokens=1, temperature=0.0),
        )
        return prompts.specs()


def stops(stop: Stop) -> tuple[str, ...]:
    """Stop strings as a tuple."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def prompts_of(field: str, given: object) -> list[str | list[int]]:
    """The prompts of a field that takes one or several. Raises RequestError for none."""
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
        return [given]
    prompts = list(given) if isinstance(given, list) else []
    if not prompts:
        raise RequestError(field, "the prompt is empty; give at least one token")
    return prompts


def numbered(rid: str | None, index: int, count: int) -> str | None:
    """The name of prompt `index` of `count`."""
    return rid if rid is None or count == 1 else f"{rid}-{index}"


def _spec(prompt: str | list[int], **fields: object) -> GenerateSpec:
    if isinstance(prompt, str):
        return GenerateSpec(text=prompt, **fields)  # type: ignore[arg-type]
    return GenerateSpec(input_ids=prompt, **fields)  # type: ignore[arg-type]
