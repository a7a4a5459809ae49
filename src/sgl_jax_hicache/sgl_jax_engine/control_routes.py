"""The routes that control the cache for the engine's HTTP server: the embedded engine's, with the same bodies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, Protocol

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response

from sgl_jax_hicache.engine.http_server.errors import ApiError
from sgl_jax_hicache.engine.http_server.schema import AttachBody, WarmUpBody
from sgl_jax_hicache.engine.requests import RequestError

from .cache_control import CacheAction, CacheAnswer, CacheCommand

_POLL_S = 0.1
_TOLD = ("prompt_tokens", "cached_tokens", "cached_tokens_details")

Timeout = Annotated[float, Query(ge=0, le=600)]


class Controlled(Protocol):
    """What the routes need of the launching process."""

    async def control_cache(self, command: CacheCommand) -> CacheAnswer:
        """Ask the scheduler."""

    async def compute(self, body: WarmUpBody, request: Request) -> list[dict[str, Any]]:
        """Prefill these prompts; the `meta_info` of each. Raises ValueError for what cannot be served."""


def add_control_routes(app: FastAPI, engine: Callable[[], Controlled], *, has_key: bool) -> None:
    """Put the routes in front of the engine's own, of which `POST /flush_cache` stays behind ours: without
    `storage=clear` it answers as ever. `has_key` False: nobody moves or removes files over HTTP."""
    router = APIRouter()

    async def ask(command: CacheCommand) -> Response:
        return _response(await engine().control_cache(command))

    @router.get("/hicache/statistics")
    async def statistics() -> Response:
        return await ask(CacheCommand(CacheAction.STATISTICS))

    @router.put("/hicache/storage-backend")
    async def attach_storage(body: AttachBody) -> Response:
        if not has_key:
            return _NO_KEY.response()
        try:
            path, max_bytes = body.folder(), body.bound()
        except RequestError as error:
            return ApiError(400, str(error), error.field).response()
        return await ask(CacheCommand(CacheAction.ATTACH, str(path), max_bytes))

    @router.delete("/hicache/storage-backend")
    async def detach_storage(timeout_s: Timeout = 30.0) -> Response:
        if not has_key:
            return _NO_KEY.response()
        end_s = time.monotonic() + timeout_s
        detached = await engine().control_cache(CacheCommand(CacheAction.DETACH))
        drained = detached
        while drained.status == 200 and not drained.body["drained"] and time.monotonic() < end_s:
            await asyncio.sleep(_POLL_S)
            drained = await engine().control_cache(CacheCommand(CacheAction.IS_DRAINED))
        if detached.status != 200:
            return _response(detached)
        return JSONResponse({"detached": True, "drained": drained.body.get("drained", False)})

    @router.post("/hicache/warm_up")
    async def warm_up(body: WarmUpBody, request: Request) -> Response:
        try:
            body.specs()  # refuses what is no prompt, in the words of the embedded engine
            infos = await engine().compute(body, request)
        except RequestError as error:
            return ApiError(400, str(error), error.field).response()
        except ValueError as error:
            return ApiError(400, str(error)).response()
        return JSONResponse(
            {"prompts": [{name: info.get(name) for name in _TOLD} for info in infos]}
        )

    own_flush = _route_of(app, "/flush_cache")

    @router.post("/flush_cache")
    async def flush_cache(storage: Literal["keep", "clear"] = "keep") -> Response:
        if storage == "keep":
            return await own_flush()
        if not has_key:
            return _NO_KEY.response()
        return await ask(CacheCommand(CacheAction.CLEAR))

    num_own = len(app.router.routes)
    app.include_router(router)
    app.router.routes[:] = app.router.routes[num_own:] + app.router.routes[:num_own]


_NO_KEY = ApiError(403, "only on a server with an API key; start it with --api-key")


def _response(answer: CacheAnswer) -> Response:
    if answer.status != 200:
        return ApiError(answer.status, answer.message).response()
    return JSONResponse(answer.body)


def _route_of(app: FastAPI, path: str) -> Callable[[], Awaitable[Response]]:
    for route in app.router.routes:
        if getattr(route, "path", None) == path:
            endpoint: Callable[[], Awaitable[Response]] = route.endpoint  # type: ignore[attr-defined]
            return endpoint
    raise LookupError(f"the engine's server has no route {path}")
