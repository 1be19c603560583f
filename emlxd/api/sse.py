"""Streams: framing, heartbeats, and how one ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import orjson
from quart import Response

from emlxd.api.errors import translate
from emlxd.api.generate import Events
from emlxd.api.render import Renderer, Said

DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": keep-alive\n\n"  # a comment: every SSE reader skips it

Frame = Callable[[Mapping[str, Any]], bytes]


def data_frame(value: Mapping[str, Any]) -> bytes:
    """One event without a name, as OpenAI's chat and completion streams use them."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def named_frame(value: Mapping[str, Any]) -> bytes:
    """One event under the name of its type, as Anthropic's messages and OpenAI's responses have them."""
    return f"event: {value['type']}\n".encode() + data_frame(value)


def line_frame(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(value) + b"\n"


def stream_response(renderer: Renderer, events: Events, heartbeat: float, *, named: bool) -> Response:
    """A response that sends each event as it comes. ``heartbeat`` in seconds, 0 for none.

    A stream of named events says itself when it is over, one of unnamed events ends with ``DONE``.
    """
    frame, last = (named_frame, b"") if named else (data_frame, DONE)
    frames = _frames(renderer, events, heartbeat, frame, last)
    return _unbuffered(frames, "text/event-stream; charset=utf-8")


def line_response(renderer: Renderer, events: Events) -> Response:
    """A response with one JSON object a line, as Ollama's streams are. It has no room for heartbeats."""
    return _unbuffered(_frames(renderer, events, 0, line_frame, b""), "application/x-ndjson")


def _unbuffered(frames: AsyncIterator[bytes], content_type: str) -> Response:
    response = Response(frames, content_type=content_type)
    response.timeout = None
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"  # nginx would hold the words back
    return response


async def _frames(
    renderer: Renderer, events: Events, heartbeat: float, frame: Frame, last: bytes
) -> AsyncIterator[bytes]:
    """A failure after the headers can only be told in the stream: an error event, then the end."""
    try:
        yield b"".join(map(frame, renderer.start()))
        async for beat in _with_heartbeat(events, heartbeat):
            yield HEARTBEAT if beat is None else b"".join(map(frame, renderer.event(*beat)))
        yield b"".join(map(frame, renderer.end())) + last
    except Exception as exception:
        yield b"".join(map(frame, renderer.failure(translate(exception))))


async def _with_heartbeat(events: Events, heartbeat: float) -> AsyncIterator[tuple[int, Said] | None]:
    """What comes from ``events``, and None for each ``heartbeat`` seconds without anything."""
    while True:
        try:
            async with asyncio.timeout(heartbeat or None):
                event = await events.__anext__()
        except TimeoutError:
            yield None
        except StopAsyncIteration:
            return
        else:
            yield event
