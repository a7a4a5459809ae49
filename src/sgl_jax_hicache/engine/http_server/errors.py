"""Every error leaves as one JSON object, the OpenAI one, and names the field at fault."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from sgl_jax.srt.mem_cache.hicache.errors import HiCacheConfigError, StorageError

from ..engine import EngineBusyError
from ..outputs import FinishKind, FinishReason
from ..requests import RequestError
from ..scheduler_thread import EngineStoppedError

_TYPE_NAME = re.compile(r"str|int|list\[.*\]")
_JSON_NAMES = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}


class ErrorInfo(BaseModel):
    """What is said of an error; `code` is its status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(BaseModel):
    """The body of every answer with an error status, for the OpenAPI."""

    error: ErrorInfo


RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": description}
    for status, description in (
        ("4XX", "A request that cannot be served as asked"),
        ("5XX", "The server is full, shutting down, or has failed"),
    )
}


class ApiError(Exception):
    """An answer with an error status. `param` is the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.headers = headers

    def response(self) -> JSONResponse:
        """The error as an answer."""
        body = error_body(self.status, str(self), self.param)
        return JSONResponse(body, self.status, headers=dict(self.headers or {}))


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The JSON object of an error."""
    fallback = "server_error" if status >= 500 else "invalid_request_error"
    kind = _KINDS.get(status, fallback)
    # What a client sent comes back in messages, and may not be Unicode.
    message = message.encode("utf-8", "replace").decode()
    param = param and param.encode("utf-8", "replace").decode()
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def of_finish(finish: FinishReason) -> ApiError:
    """What a request that ended without an answer looks like: its own fault or the server's."""
    status = 500 if finish.kind is FinishKind.ERROR else 503
    return ApiError(status, finish.message or "the request was aborted")


def install(app: FastAPI) -> None:
    """Answer every exception that a route may raise."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(EngineBusyError, _on_busy)
    app.add_exception_handler(EngineStoppedError, _on_stopped)
    app.add_exception_handler(HiCacheConfigError, _on_wrong_setting)
    app.add_exception_handler(StorageError, _on_storage_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)


async def _on_api_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_request_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    return ApiError(400, str(error), error.field).response()


async def _on_busy(_request: Request, error: Exception) -> JSONResponse:
    return ApiError(503, f"the server is full: {error}", headers={"Retry-After": "1"}).response()


async def _on_stopped(_request: Request, error: Exception) -> JSONResponse:
    return ApiError(503, str(error)).response()


async def _on_wrong_setting(_request: Request, error: Exception) -> JSONResponse:
    return ApiError(400, str(error), "path").response()


async def _on_storage_error(_request: Request, error: Exception) -> JSONResponse:
    return ApiError(409, str(error)).response()


async def _on_http_exception(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    # What the JSON parser raised; fastapi's own text says only that there was an error.
    if isinstance(error.__cause__, RecursionError):
        return ApiError(400, "the body is nested too deeply", "body").response()
    if isinstance(error.__cause__, UnicodeDecodeError):
        return ApiError(400, "the body is not valid UTF-8", "body").response()
    return ApiError(error.status_code, str(error.detail), headers=error.headers).response()


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if tuple(first["loc"]) == ("body",):
        return _of_whole_body(request, first).response()
    field = _field_name(first["loc"])
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not valid JSON: {reason}", "body").response()
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{field}: unknown field; remove it", field).response()
    return ApiError(400, f"{field}: {first['msg']}", field).response()


def _of_whole_body(request: Request, first: Mapping[str, Any]) -> ApiError:
    """The body is no JSON object, or not marked as one."""
    if "json" not in request.headers.get("content-type", ""):
        message = "send the body as JSON, with the header 'Content-Type: application/json'"
        return ApiError(415, message, "body")
    if first["type"] == "missing":
        return ApiError(400, "the body is empty; send a JSON object", "body")
    if first["type"] != "model_attributes_type":
        return ApiError(400, f"body: {first['msg']}", "body")
    kind = _JSON_NAMES[type(first["input"])]
    return ApiError(400, f"the body must be a JSON object, not {kind}", "body")


def _field_name(location: Sequence[int | str]) -> str:
    """The path of a field; where it may be of several types, pydantic's names of those are left out."""
    parts = [str(part) for part in location if not _TYPE_NAME.fullmatch(str(part))]
    return ".".join(parts[1:] if len(parts) > 1 else parts)
