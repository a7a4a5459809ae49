"""What stands before every route: the key, and the size and time of a body. Plain ASGI, so that a disconnect still
reaches the route."""

from __future__ import annotations

import asyncio
import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError

_OPEN_PATHS = frozenset({"/health"})
_BODY_TIMEOUT_S = 30.0
_DISCARD_TIMEOUT_S = 5.0
_DISCARD_FACTOR = 16
_BODIES_FACTOR = 8


class ApiKeyMiddleware:
    """Demands `Authorization: Bearer <key>` everywhere but on /health."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = b"Bearer " + api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                error = ApiError(
                    401,
                    "wrong or missing key; send it as 'Authorization: Bearer <key>'",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimitMiddleware:
    """Reads the body before the route does: at most `max_bytes`, and eight times that of all bodies that are under way
    together, within a time limit.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._bytes_left = _BODIES_FACTOR * max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body, or None if the client went away."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await self._discard(receive)
            raise self._too_large(f"{int(declared)} bytes")
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    num_bytes += len(parts[-1])
                    self._bytes_left -= len(parts[-1])
                    if self._bytes_left < 0:
                        parts.clear()
                        if message.get("more_body", False):
                            await self._discard(receive)
                        raise self._too_many()
                    if num_bytes > self._max_bytes:
                        if message.get("more_body", False):
                            await self._discard(receive)
                        raise self._too_large(f"more than {self._max_bytes} bytes")
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive in {_BODY_TIMEOUT_S:g} s") from None
        finally:
            self._bytes_left += num_bytes

    async def _discard(self, receive: Receive) -> None:
        """Read on, within bounds: a client that still sends when the connection closes never sees the answer."""
        left = _DISCARD_FACTOR * self._max_bytes
        try:
            async with asyncio.timeout(_DISCARD_TIMEOUT_S):
                while left > 0:
                    message = await receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
                    left -= len(message.get("body", b""))
        except TimeoutError:
            return  # the answer is sent all the same

    def _too_many(self) -> ApiError:
        return ApiError(
            503,
            "the server is full: too many large bodies arrive at once",
            headers={"Retry-After": "1", "Connection": "close"},
        )

    def _too_large(self, found: str) -> ApiError:
        return ApiError(
            413,
            f"the body has {found}; {self._max_bytes} are allowed",
            "body",
            {"Connection": "close"},
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive` that gives the body once, then what the server has to say."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
