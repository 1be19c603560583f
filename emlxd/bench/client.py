"""A small HTTP/1.1 client for event streams.

A load generator on the server's own machine takes time from the server, so every chunk must be
cheap: this takes half the time of a general client.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import h11
import orjson

from emlxd.errors import UserError, message_in

READ_SIZE = 1 << 16


class Rejected(UserError):
    """An answer with an error status. ``status`` is the HTTP status."""

    def __init__(self, status: int, url: str, body: bytes) -> None:
        super().__init__(f"{url} answered {status}: {_said(body)}")
        self.status = status


@asynccontextmanager
async def post_events(
    url: str, body: Mapping[str, Any], headers: Mapping[str, str], timeout: float
) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """POST ``body`` as JSON and yield an iterator over the ``data:`` events of the answer, up to ``[DONE]``.

    ``timeout`` is the longest wait for more data, in seconds. Raises Rejected for a status that is
    not 200, and UserError if the server cannot be reached, is silent, or breaks off.
    """
    try:
        reader, writer = await asyncio.wait_for(_connect(url), timeout)
    except (OSError, TimeoutError) as error:
        raise UserError(f"cannot reach {url}: {error or 'timed out'}") from None
    try:
        connection = h11.Connection(h11.CLIENT)
        writer.write(_request(connection, url, orjson.dumps(body), headers))
        async with aclosing(_events(url, connection, reader, timeout)) as events:
            yield events
    finally:
        writer.close()


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    return await asyncio.open_connection(parts.hostname, port, ssl=secure)


def _request(connection: h11.Connection, url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    parts = urlsplit(url)
    head = h11.Request(
        method="POST",
        target=parts.path + (f"?{parts.query}" if parts.query else ""),
        headers=[
            ("Host", parts.netloc.rpartition("@")[2]),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Accept", "text/event-stream"),
            *headers.items(),
        ],
    )
    parcels = [connection.send(event) for event in (head, h11.Data(data=body), h11.EndOfMessage())]
    return b"".join(parcel for parcel in parcels if parcel)


async def _events(
    url: str, connection: h11.Connection, reader: asyncio.StreamReader, timeout: float
) -> AsyncGenerator[dict[str, Any], None]:
    pending = b""
    async with aclosing(_body(url, connection, reader, timeout)) as parts:
        async for part in parts:
            *lines, pending = (pending + part).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                text = line[5:].strip()
                if text == b"[DONE]":
                    return
                yield _event(url, text)
    raise UserError(f"{url} ended the stream without [DONE]")


def _event(url: str, text: bytes) -> dict[str, Any]:
    try:
        event = orjson.loads(text)
    except orjson.JSONDecodeError:
        event = None
    if not isinstance(event, dict):
        raise UserError(f"{url} sent an event that is not a JSON object: {text[:200]!r}")
    if "error" in event:
        raise UserError(f"{url} failed in the middle of a stream: {_said(text)}")
    return event


def _said(body: bytes) -> str:
    """The message of an OpenAI error, or the beginning of what is none."""
    return (message_in(body) or body.decode(errors="replace").strip())[:500]


async def _body(
    url: str, connection: h11.Connection, reader: asyncio.StreamReader, timeout: float
) -> AsyncGenerator[bytes, None]:
    """The parts of the answer's body as they arrive."""
    status = 0
    refusal = b""
    try:
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                async with asyncio.timeout(timeout):
                    connection.receive_data(await reader.read(READ_SIZE))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                if status == 200:
                    yield bytes(event.data)
                else:
                    refusal += event.data
            elif isinstance(event, h11.EndOfMessage):
                break
    except TimeoutError:
        raise UserError(f"{url} sent nothing for {timeout:g} s") from None
    except (OSError, h11.RemoteProtocolError) as error:
        what = "broke off" if status else "closed the connection without an answer"
        raise UserError(f"{url} {what}: {error}") from None
    if status != 200:
        raise Rejected(status, url, refusal)
