"""Every exception becomes an error body here, and nowhere else: OpenAI's, or the one of the route's API.

| exception                         | status | answer                                     |
|-----------------------------------|--------|--------------------------------------------|
| an EmlxdError                     | its own| its message, type, code, param             |
| werkzeug's 404, 405, 413          | same   | RouteNotFound, MethodNotAllowed (+ Allow), PayloadTooLarge |
| any other HTTP error of werkzeug  | same   | its description, as a RequestError         |
| anything else                     | 500    | a fixed message; the traceback is logged   |
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any, cast

import orjson
import structlog
from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException
from werkzeug.exceptions import MethodNotAllowed as WerkzeugMethodNotAllowed

from emlxd.errors import (
    AuthenticationFailed,
    EmlxdError,
    MethodNotAllowed,
    PayloadTooLarge,
    QueueFull,
    RequestError,
    RouteNotFound,
    ServerFault,
    Unavailable,
)

SWALLOW_TIMEOUT = 5.0  # seconds given to a client that still sends the body of a refused request

_ERROR = "emlxd.error"  # in the scope of a request that was refused
_log = structlog.get_logger("emlxd.http")


def error_object(error: EmlxdError) -> dict[str, Any]:
    """OpenAI's error body: all four keys, always."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def ollama_error(error: EmlxdError) -> dict[str, Any]:
    """Ollama's error body."""
    return {"error": error.message}


def anthropic_error(error: EmlxdError) -> dict[str, Any]:
    """Anthropic's error body."""
    _, kind = anthropic_kind(error)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def anthropic_kind(error: EmlxdError) -> tuple[int, str]:
    """The status and the type that Anthropic's API has for ``error``."""
    kinds = {
        401: (401, "authentication_error"),
        403: (403, "permission_error"),
        404: (404, "not_found_error"),
        413: (413, "request_too_large"),
        429: (429, "rate_limit_error"),
        503: (529, "overloaded_error"),
    }
    fallback = (error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return kinds.get(error.status, fallback)


def status_and_body(error: EmlxdError, path: str) -> tuple[int, bytes]:
    """The answer for ``error`` in the shape of the API that ``path`` belongs to."""
    if path.startswith("/v1/messages"):
        return anthropic_kind(error)[0], orjson.dumps(anthropic_error(error))
    if path.startswith("/api/"):
        return error.status, orjson.dumps(ollama_error(error))
    return error.status, orjson.dumps(error_object(error))


def translate(exception: Exception) -> EmlxdError:
    """The error to show for ``exception``. What nobody foresaw is logged and shown as a plain 500."""
    if isinstance(exception, EmlxdError):
        return exception
    if isinstance(exception, HTTPException) and exception.code is not None and exception.code < 500:
        return _from_werkzeug(exception)
    _log.error("unexpected error", exc_info=exception)
    return ServerFault("The server had an error while it processed the request. It has been logged.")


def _from_werkzeug(exception: HTTPException) -> EmlxdError:
    match exception.code:
        case 404:
            return RouteNotFound(f"Unknown request URL: {request.method} {request.path[:80]}.")
        case 405:
            return MethodNotAllowed(f"Not allowed to {request.method} on {request.path[:80]}.")
        case 413:
            return PayloadTooLarge("The request body is too large.")
        case code:
            error = RequestError(exception.description or exception.name)
            error.status = code or error.status
            return error


def refusal(scope: Mapping[str, Any]) -> dict[str, str]:
    """Why a request was refused, for the log, in words of ours: the message may quote the client."""
    error: EmlxdError | None = scope.get(_ERROR)
    if error is None:
        return {}
    field = re.match(r"\w*", error.param or "")  # what follows may be a key of the client's
    found = {"error": error.code or error.type, "param": field[0] if field else ""}
    return {name: value for name, value in found.items() if value}


async def _swallow_body() -> None:
    """A close with data unread resets the connection, and the client never sees the answer."""
    try:
        async with asyncio.timeout(SWALLOW_TIMEOUT):
            async for _ in request.body:
                pass
    except TimeoutError:
        return


def install(app: Quart) -> None:
    """Make ``app`` answer every error with JSON."""

    async def answer(exception: Exception) -> Response:
        error = translate(exception)
        cast(dict[str, Any], request.scope)[_ERROR] = error
        await _swallow_body()
        status, body = status_and_body(error, request.path)
        response = Response(body, status, content_type="application/json")
        if isinstance(exception, WerkzeugMethodNotAllowed):
            response.headers["Allow"] = ", ".join(sorted({*(exception.valid_methods or ()), "OPTIONS"}))
        if isinstance(error, QueueFull | Unavailable):
            response.headers["Retry-After"] = str(error.retry_after)
        if isinstance(error, AuthenticationFailed):
            response.headers["WWW-Authenticate"] = "Bearer"
        return response

    app.register_error_handler(Exception, answer)
