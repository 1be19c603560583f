"""A request's body as a JSON object, or a 4xx that says what is wrong with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from quart import request

from emlxd.api.json_values import json_type
from emlxd.api.offload import LARGE_TEXT, offload
from emlxd.errors import PayloadTooLarge, RequestError, RequestTimedOut, UnsupportedMediaType

BODY_TIMEOUT = 60.0  # seconds for the whole body; an idle sender must not hold a connection for ever

MAX_DEPTH = 200  # of JSON: orjson reads 1,024 levels but writes 254, and answers repeat parts of requests

# curl's type unless it is told another, as in Ollama's examples. A browser that sends a form sends an Origin.
CURL_DEFAULT = "application/x-www-form-urlencoded"

T = TypeVar("T")


async def read_checked(check: Callable[[dict[str, Any]], T], max_bytes: int) -> T:
    """What ``check`` makes of the body. A large one is parsed and checked beside the event loop.

    Raises RequestError (400), RequestTimedOut, PayloadTooLarge and UnsupportedMediaType.
    """
    _check_headers()
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            data = await _read(max_bytes)
    except TimeoutError:
        raise RequestTimedOut(f"The request body did not arrive within {BODY_TIMEOUT:.0f} seconds.") from None
    return await offload(lambda: check(_parse(data)), large=len(data) > LARGE_TEXT)


def _parse(data: bytes) -> dict[str, Any]:
    if not data:
        raise RequestError("The request body is empty; expected a JSON object.")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The request body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise RequestError(f"The request body must be a JSON object, not {json_type(value)}.")
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH and deeper(value, MAX_DEPTH):
        raise RequestError(f"The request body is nested more than {MAX_DEPTH} levels deep.")
    return value


def deeper(value: Any, depth: int) -> bool:
    """Whether there are more than ``depth`` objects and arrays in one another."""
    level = [value]
    for _ in range(depth):
        inner = (part for outer in level for part in (outer.values() if isinstance(outer, dict) else outer))
        level = [part for part in inner if isinstance(part, dict | list)]
        if not level:
            return False
    return True


def _check_headers() -> None:
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding != "identity":
        raise UnsupportedMediaType(f"Content-Encoding '{encoding}' is not supported; send the body as it is.")
    # A body without a type is taken as JSON, since nothing else is served: but not from a web page, which
    # could send it unasked to a server that it may not call.
    mimetype = request.mimetype
    if not mimetype and "Origin" in request.headers:
        raise UnsupportedMediaType("A request of a web page needs the Content-Type 'application/json'.")
    if mimetype == CURL_DEFAULT and request.path.startswith("/api/") and "Origin" not in request.headers:
        return
    if mimetype and mimetype != "application/json" and not mimetype.endswith("+json"):
        raise UnsupportedMediaType(f"Content-Type '{mimetype}' is not supported; send 'application/json'.")


async def _read(max_bytes: int) -> bytes:
    data = bytearray()
    too_large = PayloadTooLarge(f"The request body is larger than {max_bytes} bytes, this server's limit.")
    if (request.content_length or 0) > max_bytes:
        raise too_large
    async for part in request.body:
        data += part
        if len(data) > max_bytes:
            raise too_large
    return bytes(data)
