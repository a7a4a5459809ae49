"""The application: routes, errors, and what stands before them."""

from __future__ import annotations

from fastapi import FastAPI

from ..engine import Engine
from . import admin_routes, cache_routes, errors, generate_routes, openai_routes
from .middleware import ApiKeyMiddleware, BodyLimitMiddleware


def create_app(
    engine: Engine, *, api_key: str | None = None, max_request_bytes: int = 8 << 20
) -> FastAPI:
    """An ASGI application around a running engine, which it neither starts nor stops."""
    app = FastAPI(
        title="sgl-jax-hicache", docs_url=None, redoc_url=None, responses=errors.RESPONSES
    )
    errors.install(app)
    for routes in (generate_routes, openai_routes, admin_routes):
        app.include_router(routes.build_router(engine))
    app.include_router(cache_routes.build_router(engine, has_key=api_key is not None))
    app.add_middleware(BodyLimitMiddleware, max_bytes=max_request_bytes)
    if api_key is not None:
        app.add_middleware(
            ApiKeyMiddleware, api_key=api_key
        )  # outermost: nobody else's body is read
    return app
