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
# Seconds. A write costs several times as much as a word, and nobody reads a hundred words a second.
WRITE_EVERY = 0.01
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
        async for batch in _batches(events, heartbeat):
            chunks = (chunk for event in batch for chunk in renderer.event(*event))
            yield b"".join(map(frame, chunks)) if batch else HEARTBEAT
        yield b"".join(map(frame, renderer.end())) + last
    except Exception as exception:
        yield b"".join(map(frame, renderer.failure(translate(exception))))


async def _batches(events: Events, heartbeat: float) -> AsyncIterator[list[tuple[int, Said]]]:
    """What comes from ``events``, every ``WRITE_EVERY`` seconds at most, and nothing after each ``heartbeat``
    seconds without any.
    """
    clock = asyncio.get_running_loop().time
    next_write = 0.0
    while True:
        try:
            async with asyncio.timeout(heartbeat or None):
                first = await events.__anext__()
        except TimeoutError:
            yield []
        except StopAsyncIteration:
            return
        else:
            yield [first, *await events.until(next_write)]
            next_write = clock() + WRITE_EVERY
