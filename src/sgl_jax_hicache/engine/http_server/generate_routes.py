"""POST /generate and /abort_request: the engine's own API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ..engine import Engine
from . import errors
from .answers import RESPONSES, Answers, ClientGone, EventStream
from .schema import AbortBody, GenerateBody

CLIENT_CLOSED = 499
LONG_ANSWER = 256
"""Tokens of an answer of which every event is sent."""


def build_router(engine: Engine) -> APIRouter:
    """The routes, bound to one engine."""
    router = APIRouter()

    @router.post("/generate", responses=RESPONSES)
    async def generate(body: GenerateBody, request: Request) -> Any:
        answers = await Answers.start(engine, request, body.specs)
        if body.stream:
            return EventStream(answers, _events(answers, body.is_batch))
        try:
            generations = await answers.finish()
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED)
        for generation in generations:
            if generation.failed and generation.finish is not None:
                raise errors.of_finish(generation.finish)
        results = [generation.result() for generation in generations]
        return JSONResponse(results if body.is_batch else results[0])

    @router.post("/abort_request")
    async def abort_request(body: AbortBody) -> dict[str, str]:
        engine.abort(body.rid)
        return {"aborted": body.rid}

    return router


async def _events(answers: Answers, is_batch: bool) -> AsyncIterator[str]:
    """Each event is the answer so far, as a whole. Of a long answer, whose events take long to make, those are left out
    that are out of date already: else one stream could keep the server from everybody else."""
    async for delta in answers.deltas():
        if len(delta.generation.token_ids) > LONG_ANSWER and answers.more_waits(delta.index):
            continue
        event = delta.generation.result()
        if is_batch:
            event["index"] = delta.index
        yield json.dumps(event, ensure_ascii=False)
