"""One HTTP exchange, from its headers to the last byte of its answer, whatever way it ends.

Quart forgets a request when its handler returns, which for a stream is before the first chunk;
and a handler cancelled between two awaits runs no ``finally`` of a generator that it only just
made. So what a request holds (a leased worker, a running generation) hangs on ``cleanup``, which
this middleware closes when the exchange is over: answered, failed, or the client gone.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import structlog
from hypercorn.typing import (
    ASGIFramework,
    ASGIReceiveCallable,
    ASGISendCallable,
    ASGISendEvent,
    HTTPScope,
    Scope,
)
from quart import request

from emlxd.api.errors import refusal, status_and_body, translate
from emlxd.core import GenerateRequest
from emlxd.errors import RouteNotFound
from emlxd.log import bind_request
from emlxd.metrics import Metrics

CLIENT_CLOSED = 499  # nginx's number for a client that left before the answer began
# Asked every few seconds: logged when they fail.
PROBES = frozenset({"/health", "/ready", "/metrics", "/admin/status"})
_KEY = "emlxd.exchange"
_REQUEST_ID = re.compile(rb"[\w.:=@+-]{1,128}")
_log = structlog.get_logger("emlxd.http")


@dataclass(slots=True)
class Tally:
    """What an exchange took of which model. ``first_token`` is in seconds from the request's arrival."""

    model: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    first_token: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    asked: GenerateRequest | None = None

    def fields(self) -> dict[str, Any]:
        """For the log; nothing if there was no model."""
        if not self.model:
            return {}
        return {
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "first_token_seconds": None if self.first_token is None else round(self.first_token, 4),
            "finish_reason": ",".join(dict.fromkeys(self.finish_reasons)) or None,
        }


@dataclass(slots=True)
class Exchange:
    """``route`` is the URL template, not the path: it labels metrics, so its values are few.

    ``id`` is made here and unique. ``request_id`` is the client's own where it has sent one. ``traceparent``
    is the header of W3C Trace Context. ``owner`` differs for clients with different keys.
    """

    method: str
    client: str = ""
    sent_id: str = ""
    traceparent: str = ""
    started: float = field(default_factory=time.perf_counter)
    id: str = field(default_factory=lambda: f"req_{uuid.uuid4().hex}")
    cleanup: AsyncExitStack = field(default_factory=AsyncExitStack)
    route: str = "unmatched"
    owner: bytes = b""
    status: int | None = None
    tally: Tally = field(default_factory=Tally)

    @property
    def request_id(self) -> str:
        return self.sent_id or self.id

    @property
    def generation_id(self) -> str:
        """Unique, and tells of both ids: what workers call the request."""
        return f"{self.sent_id}.{self.id}" if self.sent_id else self.id

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


Ended = Callable[[Exchange, int], None]


def current_exchange() -> Exchange:
    """The exchange of the request that the calling handler serves."""
    return cast(Exchange, cast(dict[str, Any], request.scope)[_KEY])


class ExchangeMiddleware:
    """Opens an exchange for each HTTP request, counts it, and lets no error out unanswered."""

    def __init__(self, app: ASGIFramework, metrics: Metrics, ended: Ended | None = None) -> None:
        """``ended`` is told of each exchange with its status."""
        self._app = app
        self._metrics = metrics
        self._ended = ended

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        if scope["type"] == "websocket":
            await _refuse_websocket(scope["path"], send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A slash at the end changes nothing, and "GET ?x" has no path, which Quart takes for its own error.
        scope["path"] = scope["path"].removesuffix("/") or "/"
        client = scope.get("client")
        exchange = Exchange(
            scope["method"],
            client[0] if client else "",
            _sent_id(scope),
            _header(scope, b"traceparent").decode("latin-1"),
        )
        cast(dict[str, Any], scope)[_KEY] = exchange
        bind_request(exchange.request_id)
        try:
            async with exchange.cleanup:
                await self._answer(exchange, scope, receive, send)
        finally:
            self._finish(exchange, scope)

    async def _answer(
        self, exchange: Exchange, scope: HTTPScope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        async def noting_send(event: ASGISendEvent) -> None:
            if event["type"] == "http.response.start":
                exchange.status = event["status"]
                id = exchange.request_id.encode()
                # Anthropic's clients look for the second.
                event["headers"] = [*event["headers"], (b"x-request-id", id), (b"request-id", id)]
            await send(event)

        try:
            await self._app(scope, receive, noting_send)
        except Exception as exception:
            if exchange.status is not None:
                raise
            await _send_error(noting_send, scope["path"], exception)

    def _finish(self, exchange: Exchange, scope: HTTPScope) -> None:
        status = exchange.status or CLIENT_CLOSED
        self._metrics.http_request(exchange.route, exchange.method, status, exchange.seconds)
        probe = exchange.route in PROBES and status == 200
        _log.log(
            logging.DEBUG if probe else logging.INFO,
            "request",
            method=exchange.method,
            path=scope["path"],
            status=status,
            seconds=round(exchange.seconds, 4),
            client=exchange.client,
            **exchange.tally.fields(),
            **refusal(cast(dict[str, Any], scope)),
        )
        if self._ended is not None:
            self._ended(exchange, status)


def _sent_id(scope: HTTPScope) -> str:
    """The client's own id for its request; one that would not be safe in a header or a log is passed over."""
    sent = _header(scope, b"x-request-id")
    return sent.decode() if _REQUEST_ID.fullmatch(sent) else ""


def _header(scope: HTTPScope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


async def _send_error(send: ASGISendCallable, path: str, exception: Exception) -> None:
    """Answer for an error that Quart did not: one in its own handling of the request."""
    status, body = status_and_body(translate(exception), path)
    await send({"type": "http.response.start", "status": status, "headers": _json_headers(body)})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _refuse_websocket(path: str, send: ASGISendCallable) -> None:
    status, body = status_and_body(RouteNotFound(f"No websocket at {path}."), path)
    await send({"type": "websocket.http.response.start", "status": status, "headers": _json_headers(body)})
    await send({"type": "websocket.http.response.body", "body": body, "more_body": False})


def _json_headers(body: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
