"""Control of the cache while it serves: statistics, flush, storage that comes and goes, warm-up."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from ..engine import Engine
from . import errors
from .answers import Answers, ClientGone
from .errors import ApiError
from .generate_routes import CLIENT_CLOSED
from .schema import AttachBody, WarmUpBody

Timeout = Annotated[float, Query(ge=0, le=600)]


def build_router(engine: Engine, *, has_key: bool) -> APIRouter:
    """The routes, bound to one engine. Without an API key, whoever reaches the port could send pages anywhere and
    remove them: `has_key` False refuses that."""
    router = APIRouter()

    def need_key() -> None:
        if not has_key:
            raise ApiError(403, "only on a server with an API key; start it with --api-key")

    @router.get("/flush_cache")
    async def get_flush_cache(timeout_s: Timeout = 30.0) -> dict[str, Any]:
        return await flush(timeout_s)

    @router.post("/flush_cache")
    async def flush_cache(
        timeout_s: Timeout = 30.0, storage: Literal["keep", "clear"] = "keep"
    ) -> dict[str, Any]:
        if storage == "keep":
            return await flush(timeout_s)
        need_key()
        num_removed = await run_in_threadpool(engine.clear_cache, timeout_s)
        if num_removed is None:
            raise _not_flushed(timeout_s)
        return {"flushed": True, "storage_pages_removed": num_removed}

    async def flush(timeout_s: float) -> dict[str, Any]:
        if not await run_in_threadpool(engine.flush_cache, timeout_s):
            raise _not_flushed(timeout_s)
        return {"flushed": True}

    @router.get("/hicache/statistics")
    async def statistics() -> dict[str, Any]:
        return await run_in_threadpool(engine.cache_statistics)

    @router.put("/hicache/storage-backend", dependencies=[Depends(need_key)])
    async def attach_storage(body: AttachBody) -> dict[str, Any]:
        path, max_bytes = body.folder(), body.bound()
        await run_in_threadpool(engine.attach_storage, path, max_bytes)
        return {"attached": True, "path": str(path), "max_bytes": max_bytes}

    @router.delete("/hicache/storage-backend", dependencies=[Depends(need_key)])
    async def detach_storage(timeout_s: Timeout = 30.0) -> dict[str, Any]:
        drained = await run_in_threadpool(engine.detach_storage, timeout_s)
        return {"detached": True, "drained": drained}

    @router.post("/hicache/warm_up")
    async def warm_up(body: WarmUpBody, request: Request) -> Any:
        answers = await Answers.start(engine, request, body.specs)
        try:
            generations = await answers.finish()
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED)
        for generation in generations:
            if generation.failed and generation.finish is not None:
                raise errors.of_finish(generation.finish)
        told = ("prompt_tokens", "cached_tokens", "cached_tokens_details")
        infos = [generation.result()["meta_info"] for generation in generations]
        return {"prompts": [{name: info[name] for name in told} for info in infos]}

    return router


def _not_flushed(timeout_s: float) -> ApiError:
    return ApiError(409, f"not flushed: requests or transfers were unfinished for {timeout_s:g} s")
