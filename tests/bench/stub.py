"""A tiny OpenAI-compatible server in the test's own loop, which misbehaves as told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

FIRST_TOKEN = 0.03  # seconds; the only thing that the tests time, and only from below


@dataclass
class Stub:
    """``bodies`` are the requests that came. ``most`` is how many were open at once."""

    usage: bool = True
    status: int = 200
    script: str = "whole"
    words: int = 5
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    open: int = 0
    most: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await self._answer(reader, writer)
        finally:
            self.open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(line.split(":")[1] for line in head.lower().split("\r\n") if "content-length" in line)
        body = json.loads(await reader.readexactly(int(length)))
        self.heads.append(head)
        self.bodies.append(body)
        if self.script == "hang up":
            return
        if self.status != 200 or ("stream_options" in body and not self.usage):
            text = b'{"error": {"message": "no"}}'
            status = 400 if self.status == 200 else self.status
            writer.write(f"HTTP/1.1 {status} No\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(FIRST_TOKEN)
        for part in self._parts(body):
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
            await asyncio.sleep(0)
        if self.script == "silent":
            await reader.read()
        if self.script != "break off":
            writer.write(b"0\r\n\r\n")
            await writer.drain()

    def _parts(self, body: dict[str, Any]) -> list[bytes]:
        """The chunks of the answer, cut across the lines of its events."""
        count = min(self.words, body["max_tokens"])
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        choices = [[self._choice(body, f" w{i}")] for i in range(count)]
        events: list[dict[str, Any]] = [
            {"choices": choice} for choice in [[self._choice(body, "")], *choices]
        ]
        if "stream_options" in body:
            usage = {"prompt_tokens": len(prompt.split()) + 10, "completion_tokens": 2 * count}
            events.append({"choices": [], "usage": usage})
        if self.script == "error":
            events[-1] = {"error": {"message": "out of memory"}}
        lines = [b": comment\n\n", *(f"data: {json.dumps(event)}\n\n".encode() for event in events)]
        if self.script == "garbage":
            lines.append(b"data: {oops\n\n")
        if self.script == "whole":
            lines.append(b"data: [DONE]\n\n")
        text = b"".join(lines)
        return [text[at : at + 37] for at in range(0, len(text), 37)]

    def _choice(self, body: dict[str, Any], text: str) -> dict[str, Any]:
        return {"text": text} if "prompt" in body else {"delta": {"role": "assistant", "content": text}}


@asynccontextmanager
async def serving(stub: Stub) -> AsyncIterator[Stub]:
    server = await asyncio.start_server(stub.handle, "127.0.0.1", 0)
    stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield stub
