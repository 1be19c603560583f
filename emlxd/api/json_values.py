"""JSON as the routes read and write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from quart import Response

Json = dict[str, Any]
"""A JSON object."""


def json_response(value: Any, status: int = 200) -> Response:
    return json_bytes(orjson.dumps(value), status)


def json_bytes(body: bytes, status: int = 200) -> Response:
    return Response(body, status, content_type="application/json")


def json_type(value: Any) -> str:
    """What JSON calls the type of ``value``, with an article."""
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array"}
    return "null" if value is None else names.get(type(value), "an object")


def no_content(headers: Mapping[str, str]) -> Response:
    """Status 204, and no type of what there is not."""
    response = Response(status=204, headers=dict(headers))
    del response.headers["Content-Type"]
    return response
