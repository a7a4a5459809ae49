"""Health, metrics and server info."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool

from ..engine import Engine
from .errors import ApiError


def build_router(engine: Engine) -> APIRouter:
    """The routes, bound to one engine."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        if not engine.healthy:
            raise ApiError(503, "the engine is not running")
        return {"status": "ok"}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        text = await run_in_threadpool(generate_latest, engine.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @router.get("/get_server_info")
    async def get_server_info() -> dict[str, Any]:
        return await run_in_threadpool(engine.get_server_info)

    return router
