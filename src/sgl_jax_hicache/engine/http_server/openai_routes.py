"""POST /v1/completions, POST /v1/chat/completions and GET /v1/models."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ..engine import Engine
from ..generation import Generation
from . import errors
from .answers import RESPONSES, Answers, ClientGone, Delta, EventStream
from .generate_routes import CLIENT_CLOSED
from .openai_format import chat_logprobs, completion_logprobs, finish_name, usage
from .schema import ChatBody, CompletionBody, OpenAIBody

ChoiceOf = Callable[[Delta], dict[str, Any]]


@dataclass(frozen=True)
class Envelope:
    """What every object of one answer carries."""

    id: str
    created: int
    model: str

    def wrap(self, kind: str, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """An answer, or one event of it."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **fields,
        }


def build_router(engine: Engine) -> APIRouter:
    """The routes, bound to one engine."""
    router = APIRouter(prefix="/v1")
    started = int(time.time())

    def envelope(prefix: str, body: OpenAIBody) -> Envelope:
        if body.model is not None and body.model != engine.served_model_name:
            raise errors.ApiError(
                404,
                f"no model {body.model!r}; this server has {engine.served_model_name!r}",
                "model",
            )
        rid = body.rid or secrets.token_hex(12)
        return Envelope(f"{prefix}-{rid}", int(time.time()), engine.served_model_name)

    @router.post("/completions", responses=RESPONSES)
    async def completions(body: CompletionBody, request: Request) -> Any:
        frame = envelope("cmpl", body)
        answers = await Answers.start(engine, request, body.specs)
        with_logprobs = body.logprobs is not None
        if body.stream:
            choice = _completion_delta(with_logprobs)
            return EventStream(
                answers, _events(answers, frame, "text_completion", choice, body.include_usage)
            )
        return await _whole(
            answers,
            frame,
            "text_completion",
            lambda index, answer: _completion_choice(index, answer, with_logprobs),
        )

    @router.post("/chat/completions", responses=RESPONSES)
    async def chat_completions(body: ChatBody, request: Request) -> Any:
        frame = envelope("chatcmpl", body)
        answers = await Answers.start(
            engine, request, lambda: body.specs(engine.tokenizer.chat_template.render)
        )
        if body.stream:
            choice = _chat_delta(body.logprobs)
            return EventStream(
                answers,
                _events(answers, frame, "chat.completion.chunk", choice, body.include_usage),
            )
        return await _whole(
            answers,
            frame,
            "chat.completion",
            lambda index, answer: _chat_choice(index, answer, body.logprobs),
        )

    @router.get("/models")
    async def models() -> dict[str, Any]:
        model = {
            "id": engine.served_model_name,
            "object": "model",
            "created": started,
            "owned_by": "sgl-jax-hicache",
        }
        return {"object": "list", "data": [model]}

    return router


async def _whole(
    answers: Answers,
    frame: Envelope,
    kind: str,
    choice_of: Callable[[int, Generation], dict[str, Any]],
) -> Response:
    try:
        generations = await answers.finish()
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED)
    for generation in generations:
        if generation.failed and generation.finish is not None:
            raise errors.of_finish(generation.finish)
    choices = [choice_of(index, generation) for index, generation in enumerate(generations)]
    return JSONResponse(frame.wrap(kind, choices, usage=usage(generations)))


async def _events(
    answers: Answers, frame: Envelope, kind: str, choice_of: ChoiceOf, include_usage: bool
) -> AsyncIterator[str]:
    # With include_usage every event has the field, and only the last one, without a choice, fills it.
    extra: dict[str, Any] = {"usage": None} if include_usage else {}
    async for delta in answers.deltas():
        generation = delta.generation
        if generation.failed and generation.finish is not None:
            error = errors.of_finish(generation.finish)
            yield _json(errors.error_body(error.status, str(error)))
            return
        yield _json(frame.wrap(kind, [choice_of(delta)], **extra))
    if include_usage:
        yield _json(frame.wrap(kind, [], usage=usage(answers.generations)))


def _json(event: dict[str, Any]) -> str:
    return json.dumps(event, ensure_ascii=False)


def _completion_choice(index: int, generation: Generation, with_logprobs: bool) -> dict[str, Any]:
    return {
        "index": index,
        "text": generation.text,
        "logprobs": completion_logprobs(generation, 0, 0) if with_logprobs else None,
        "finish_reason": finish_name(generation.finish),
    }


def _completion_delta(with_logprobs: bool) -> ChoiceOf:
    def choice(delta: Delta) -> dict[str, Any]:
        generation = delta.generation
        offset = len(generation.text) - len(delta.text)
        logprobs = completion_logprobs(generation, delta.first_token, offset)
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": logprobs if with_logprobs else None,
            "finish_reason": finish_name(generation.finish),
        }

    return choice


def _chat_choice(index: int, generation: Generation, with_logprobs: bool) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": generation.text},
        "logprobs": chat_logprobs(generation, 0) if with_logprobs else None,
        "finish_reason": finish_name(generation.finish),
    }


def _chat_delta(with_logprobs: bool) -> ChoiceOf:
    def choice(delta: Delta) -> dict[str, Any]:
        role = {"role": "assistant"} if delta.first_token == 0 else {}
        logprobs = chat_logprobs(delta.generation, delta.first_token) if with_logprobs else None
        return {
            "index": delta.index,
            "delta": {**role, "content": delta.text},
            "logprobs": logprobs,
            "finish_reason": finish_name(delta.generation.finish),
        }

    return choice
