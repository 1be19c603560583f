"""What the SDKs hide: framing, heartbeats, odd bodies, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from emlxd.api import sse
from emlxd.api.app import create_app
from emlxd.config import Settings
from emlxd.errors import ServerFault
from emlxd.metrics import Metrics
from tests.api.conftest import Server, start_server
from tests.api.wire import Wire, connect
from tests.fakes import FakeRegistry, FakeWorker

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
BODY = {"model": "fake", "messages": HELLO}
STREAM = BODY | {"stream": True}


def payloads(body: bytes) -> list[Any]:
    """The data of each event; checks that nothing but events and comments is there."""
    events = body.decode().split("\n\n")
    assert events.pop() == ""
    return [
        event.removeprefix("data: ") if event == "data: [DONE]" else json.loads(event.removeprefix("data: "))
        for event in events
        if not event.startswith(":")
    ]


async def test_framing(server: Server) -> None:
    async with connect(server.port) as wire:
        await wire.post(CHAT, STREAM)
        status, headers = await wire.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert headers["cache-control"] == "no-cache"
        assert "server" not in headers and "date" in headers
        parts = [part async for part in chunks_of(wire)]
        assert all(part.startswith(b"data: ") and part.endswith(b"\n\n") for part in parts)
        events = payloads(b"".join(parts))
        assert len(events) == 1 + 6 + 1 + 1
        assert events[-1] == "[DONE]"


@pytest.mark.parametrize(("every", "writes"), [(0.0, 1 + 6 + 1 + 1), (3600.0, 1 + 1 + 1 + 1)])
async def test_words_that_come_fast_share_a_write(
    server: Server, monkeypatch: pytest.MonkeyPatch, every: float, writes: int
) -> None:
    monkeypatch.setattr(sse, "WRITE_EVERY", every)
    server.worker.patient = True  # the loop runs between two words
    async with connect(server.port) as wire:
        await wire.post(CHAT, STREAM)
        await wire.head()
        parts = [part async for part in chunks_of(wire)]
        assert len(parts) == writes
        assert len(payloads(b"".join(parts))) == 1 + 6 + 1 + 1


async def chunks_of(wire: Wire) -> Any:
    while part := await wire.chunk():
        yield part


async def test_connection_is_kept_after_a_stream(server: Server) -> None:
    async with connect(server.port) as wire:
        for _ in range(3):
            await wire.post(CHAT, STREAM)
            assert (await wire.head())[0] == 200
            assert (await wire.body()).endswith(b"data: [DONE]\n\n")


async def test_headers_and_role_come_before_the_first_token(server: Server) -> None:
    """Edge case 17."""
    server.worker.gate.clear()
    async with connect(server.port) as wire:
        await wire.post(CHAT, STREAM)
        await wire.head()
        (role,) = payloads(await wire.chunk())
        assert role["choices"][0]["delta"]["role"] == "assistant"
        server.worker.gate.set()
        assert (await wire.body()).endswith(b"data: [DONE]\n\n")


async def test_heartbeats_fill_a_silence() -> None:
    """Edge case 17."""
    worker = FakeWorker()
    worker.gate.clear()
    async with start_server(FakeRegistry(worker), heartbeat=0.01) as server, connect(server.port) as wire:
        await wire.post(CHAT, STREAM)
        await wire.head()
        assert b"assistant" in await wire.chunk()
        for _ in range(3):
            assert await wire.chunk() == b": keep-alive\n\n"
        worker.gate.set()
        text = "".join(
            event["choices"][0]["delta"].get("content", "") for event in payloads(await wire.body())[:-1]
        )
        assert text == "one two three four five six"


async def test_heartbeats_lose_nothing_of_several_choices() -> None:
    worker = FakeWorker()
    worker.gate.clear()
    async with start_server(FakeRegistry(worker), heartbeat=0.005) as server, connect(server.port) as wire:
        await wire.post(CHAT, STREAM | {"n": 2})
        await wire.head()
        while await wire.chunk() != b": keep-alive\n\n":
            pass
        worker.gate.set()
        events = payloads(await wire.body())[:-1]
        for index in range(2):
            mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
            assert "".join(one["delta"].get("content", "") for one in mine) == "one two three four five six"


async def test_no_heartbeats_when_off(server: Server) -> None:
    async with connect(server.port) as wire:
        await wire.post(CHAT, STREAM)
        await wire.head()
        assert b": keep-alive" not in await wire.body()


@pytest.mark.parametrize("fail_after", [0, 2])
async def test_failure_in_mid_stream(server: Server, client: openai.AsyncOpenAI, fail_after: int) -> None:
    """Edge case 14. The text so far, an error event, the end. No finish_reason, no [DONE]."""
    server.worker.failure, server.worker.fail_after = ServerFault("it broke"), fail_after
    async with connect(server.port) as wire:
        await wire.post(CHAT, STREAM)
        assert (await wire.head())[0] == 200
        *chunks, error = payloads(await wire.body())
        assert error == {
            "error": {"message": "it broke", "type": "server_error", "param": None, "code": None}
        }
        assert len(chunks) == 1 + fail_after
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    heard = ""
    with pytest.raises(openai.APIError, match="it broke"):
        async for chunk in await client.chat.completions.create(model="fake", messages=HELLO, stream=True):
            heard += chunk.choices[0].delta.content or ""
    assert heard == "one two"[: 7 if fail_after else 0]
    labels = {"model": "org/fake-1b", "endpoint": CHAT, "finish_reason": "error"}
    assert server.metric("emlxd_requests_total", **labels) == 2


async def test_one_failure_ends_all_choices(server: Server) -> None:
    server.worker.failure, server.worker.fail_after = ServerFault("it broke"), 1
    async with connect(server.port) as wire:
        await wire.post(CHAT, STREAM | {"n": 2})
        await wire.head()
        assert payloads(await wire.body())[-1]["error"]["message"] == "it broke"
    await server.worker.idle.wait()


async def abandoned(server: Server, answers: int = 1) -> None:
    """Waits until the server has noticed and holds nothing any more."""
    while not server.worker.cancelled or server.registry.leased:
        await asyncio.sleep(0)
    await server.worker.idle.wait()
    assert len(server.worker.cancelled) == len(server.worker.submitted) == 1
    labels = {"model": "org/fake-1b", "endpoint": CHAT, "finish_reason": "abort"}
    assert server.metric("emlxd_requests_total", **labels) == answers


@pytest.mark.parametrize("rude", [True, False])
async def test_leaving_a_stream(server: Server, rude: bool) -> None:
    """Edge cases 3 and 4."""
    server.worker.gate.clear()
    server.worker.free = 3
    async with connect(server.port) as wire:
        await wire.post(CHAT, STREAM)
        await wire.head()
        while b"three" not in await wire.chunk():
            pass
        wire.reset() if rude else wire.close()
        await abandoned(server)
    assert (await get(server, "/health")).status_code == 200


@pytest.mark.parametrize("rude", [True, False])
async def test_leaving_before_the_first_token(server: Server, rude: bool) -> None:
    server.worker.gate.clear()
    async with connect(server.port) as wire:
        await wire.post(CHAT, STREAM)
        await wire.head()
        wire.reset() if rude else wire.close()
        await abandoned(server)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("rude", [True, False])
async def test_leaving_a_whole_answer(server: Server, rude: bool, n: int) -> None:
    """Edge case 3. Nothing is written before the end, so only the closed connection can tell."""
    server.worker.gate.clear()
    async with connect(server.port) as wire:
        await wire.post(CHAT, BODY | {"n": n})
        await server.worker.busy.wait()
        wire.reset() if rude else wire.close()
        await abandoned(server, n)
    requests = {"route": CHAT, "method": "POST", "status": "499"}
    assert server.metric("emlxd_http_requests_total", **requests) == 1


async def test_leaving_while_the_prompt_is_encoded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, left = asyncio.Event(), asyncio.Event()

    async def encode_chat(*_: Any, **__: Any) -> list[int]:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        return []

    monkeypatch.setattr(server.worker, "encode_chat", encode_chat)
    async with connect(server.port) as wire:
        await wire.post(CHAT, BODY)
        await entered.wait()
        wire.close()
        await left.wait()
    assert server.worker.submitted == []


async def test_leaving_between_submission_and_the_headers() -> None:
    """The handler is cancelled with a generation running and a stream that never began."""
    registry, answering = FakeRegistry(), asyncio.Event()
    registry.worker.gate.clear()
    app = create_app(registry, Settings(), Metrics(device="fake"))
    messages: list[Any] = [{"type": "http.request", "body": json.dumps(STREAM).encode()}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await answering.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        answering.set()
        await asyncio.Event().wait()

    scope: Any = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": CHAT,
        "query_string": b"",
        "headers": [(b"host", b"x")],
    }
    await app(scope, receive, send)
    assert len(registry.worker.submitted) == len(registry.worker.cancelled) == 1
    assert registry.leased == 0


async def test_slow_reader_does_not_hold_up_others(server: Server, client: openai.AsyncOpenAI) -> None:
    server.worker.words = [" word" * 1000] * 900
    async with connect(server.port) as wire:
        await wire.post(CHAT, STREAM)
        await wire.head()
        answer = await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1)
        assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("path", "asked"),
    [(CHAT, STREAM), ("/v1/completions", {"model": "fake", "prompt": ["a", "b"], "stream": True})],
)
async def test_a_client_that_does_not_read_is_cut_off(
    server: Server, path: str, asked: dict[str, Any]
) -> None:
    """It gets what it was sent, an error and the end; the worker was told to stop long before."""
    server.worker.words, server.worker.patient = [" word" * 10_000] * 300, True
    async with connect(server.port) as wire:
        await wire.post(path, asked | {"max_tokens": 300})
        while not server.worker.cancelled:
            await asyncio.sleep(0)
        await wire.head()
        *chunks, error = payloads(await wire.body())
        assert error["error"]["code"] == "client_too_slow"
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert server.registry.leased == 0


async def get(server: Server, path: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=server.url) as http:
        return await http.get(path)


async def test_chunked_body(server: Server) -> None:
    """Edge case 15."""
    data = json.dumps(BODY).encode()
    async with connect(server.port) as wire:
        await wire.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for part in (data[:10], data[10:]):
            await wire.send(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        await wire.send(b"0\r\n\r\n")
        assert (await wire.head())[0] == 200


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_post_without_a_body(server: Server, version: str) -> None:
    """Edge case 15."""
    async with connect(server.port) as wire:
        await wire.send(f"POST {CHAT} HTTP/{version}\r\nHost: x\r\n\r\n".encode())
        status, headers = await wire.head()
        assert (status, headers["content-type"]) == (400, "application/json")


async def test_expect_continue(server: Server) -> None:
    data = json.dumps(BODY).encode()
    async with connect(server.port) as wire:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        await wire.send(head.encode())
        assert (await wire.head())[0] == 100
        await wire.send(data)
        assert (await wire.head())[0] == 200


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("*", 404),
        ("http://x/nowhere", 404),
        ("x:80", 404),
        ("http://x/health", 200),
        ("/health?a=%ff", 200),
    ],
)
async def test_odd_targets(server: Server, target: str, status: int) -> None:
    async with connect(server.port) as wire:
        await wire.send(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        got, headers = await wire.head()
        assert (got, headers["content-type"]) == (status, "application/json")


@pytest.mark.parametrize("target", ["?x", "http://x"])
async def test_a_target_without_a_path_is_the_page(server: Server, target: str) -> None:
    async with connect(server.port) as wire:
        await wire.send(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert (await wire.head())[0] == 200


async def test_websocket_is_refused(server: Server) -> None:
    async with connect(server.port) as wire:
        await wire.send(
            b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        status, headers = await wire.head()
        assert (status, headers["content-type"]) == (404, "application/json")


@pytest.mark.parametrize(
    "garbage", [b"hello\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"\x00" * 100_000]
)
async def test_garbage_does_not_hurt(server: Server, garbage: bytes) -> None:
    async with connect(server.port) as wire:
        await wire.send(garbage)
        wire.writer.write_eof()
        answer = await wire.reader.read()
        assert b"<html" not in answer.lower()
    assert (await get(server, "/health")).status_code == 200


async def test_large_headers_are_taken_up_to_the_limit(server: Server) -> None:
    async with connect(server.port) as wire:
        await wire.send(b"GET /health HTTP/1.1\r\nHost: x\r\nCookie: " + b"c" * 60_000)
        for _ in range(50):  # the server reads what it has, an unfinished header
            await asyncio.sleep(0)
        await wire.send(b"\r\n\r\n")
        assert (await wire.head())[0] == 200
    async with connect(server.port) as wire:
        await wire.send(b"GET /health HTTP/1.1\r\nHost: x\r\nCookie: " + b"c" * 200_000)
        assert (await wire.head())[0] == 431


async def test_a_request_with_an_upgrade_header_is_served(server: Server) -> None:
    """Java's HTTP client offers h2c on every request."""
    async with connect(server.port) as wire:
        await wire.post(
            CHAT, BODY, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"
        )
        assert (await wire.head())[0] == 200
