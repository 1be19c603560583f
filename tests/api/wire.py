"""A bare HTTP/1.1 client that shows every byte and can be rude."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


class Wire:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def post(self, path: str, body: dict[str, Any], *headers: str) -> None:
        data = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
        head = "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""])
        await self.send(head.encode() + data)

    async def head(self) -> tuple[int, dict[str, str]]:
        """The status and the headers, names in lower case."""
        text = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = text.strip().split("\r\n")
        pairs = (line.split(": ", 1) for line in lines)
        return int(status.split()[1]), {name.lower(): value for name, value in pairs}

    async def chunk(self) -> bytes:
        """One chunk of a chunked body, b"" at its end."""
        size = int(await self.reader.readline(), 16)
        data = await self.reader.readexactly(size + 2)
        return data[:-2]

    async def body(self) -> bytes:
        """The rest of a chunked body."""
        data = b""
        while part := await self.chunk():
            data += part
        return data

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        """Close so that the other side's next write fails."""
        self.writer.transport.abort()


@asynccontextmanager
async def connect(port: int) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()
