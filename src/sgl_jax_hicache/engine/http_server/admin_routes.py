"""Health, metrics, server info and the cache flush."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
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

    @router.get("/flush_cache")
    @router.post("/flush_cache")
    async def flush_cache(
        timeout_s: Annotated[float, Query(ge=0, le=600)] = 30.0,
    ) -> dict[str, bool]:
        if not await run_in_threadpool(engine.flush_cache, timeout_s):
            raise ApiError(
                409, f"not flushed: requests or transfers were unfinished for {timeout_s:g} s"
            )
        return {"flushed": True}

    @router.get("/get_server_info")
    async def get_server_info() -> dict[str, Any]:
        return await run_in_threadpool(engine.get_server_info)

    return router
