"""The composition root: binding, announcing, draining, signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from typing import Any

import httpx
import pytest
import structlog

from emlxd.config import ServerSettings, Settings
from emlxd.errors import SourceError, UserError
from emlxd.metrics import Metrics
from emlxd.server import Front, bind, serve
from tests.api.conftest import Server, start_server
from tests.api.test_wire import CHAT, STREAM, payloads
from tests.api.wire import connect
from tests.fakes import FakeRegistry, FakeWorker

ONE_TOKEN = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError) as caught:
            bind(ServerSettings(port=port))
    assert str(port) in caught.value.message and "in use" in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("host", ["203.0.113.1", "no such host"])
def test_an_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(UserError, match="Cannot serve on"):
        bind(ServerSettings(host=host, port=free_port()))


def test_bound_but_not_yet_listening() -> None:
    """Clients are refused, not left hanging, until the server runs; and nobody else gets the port."""
    port = free_port()
    with bind(ServerSettings(port=port)) as listener:
        assert listener.getsockname()[1] == port
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


async def test_it_says_what_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    async with start_server() as server, httpx.AsyncClient(base_url=server.url) as http:
        await http.get("/health")
        assert f"org/fake-1b at {server.url}/v1" in capsys.readouterr().out


async def running_stream(server: Server, wire: Any) -> None:
    await wire.post(CHAT, STREAM)
    await wire.head()
    await wire.chunk()


async def test_drain_lets_a_stream_finish() -> None:
    worker = FakeWorker()
    worker.gate.clear()
    async with start_server(FakeRegistry(worker), drain_timeout=60) as server, connect(server.port) as wire:
        await running_stream(server, wire)
        with structlog.testing.capture_logs() as lines:
            server.stop.set()
            await refused(server.port)
        assert [(line["generations"], line["at_most_seconds"]) for line in lines] == [(1, 60)]
        assert "another signal" in lines[0]["event"]
        worker.gate.set()
        assert (await wire.body()).endswith(b"data: [DONE]\n\n")
        await server.task


async def refused(port: int) -> None:
    """Waits until new connections are refused."""
    while True:
        with contextlib.suppress(ConnectionResetError):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return
            writer.transport.abort()


async def test_drain_limit_cuts_a_stream_with_an_error() -> None:
    worker = FakeWorker()
    worker.gate.clear()
    async with start_server(FakeRegistry(worker), drain_timeout=0) as server, connect(server.port) as wire:
        await running_stream(server, wire)
        server.stop.set()
        (error,) = payloads(await wire.body())
        assert error["error"]["code"] == "service_unavailable"
        assert "shutting down" in error["error"]["message"]
        await server.task
        await worker.idle.wait()


async def test_drain_limit_answers_a_waiting_client() -> None:
    worker = FakeWorker()
    worker.gate.clear()
    async with start_server(FakeRegistry(worker), drain_timeout=0) as server, connect(server.port) as wire:
        await wire.post(CHAT, ONE_TOKEN)
        await worker.busy.wait()
        server.stop.set()
        status, headers = await wire.head()
        assert (status, headers["retry-after"]) == (503, "1")
        await server.task


async def test_nothing_new_starts_in_a_drain() -> None:
    """A request whose body arrives after the signal."""
    data = json.dumps(ONE_TOKEN).encode()
    async with start_server(drain_timeout=60) as server, connect(server.port) as wire:
        lines = [f"POST {CHAT} HTTP/1.1", "Host: x", "Expect: 100-continue", f"Content-Length: {len(data)}"]
        await wire.send("\r\n".join([*lines, "", ""]).encode())
        assert (await wire.head())[0] == 100  # the request has begun
        server.stop.set()
        await refused(server.port)
        await wire.send(data)
        assert (await wire.head())[0] == 503
        assert server.worker.submitted == []
        await server.task


async def test_idle_connections_do_not_delay_the_end() -> None:
    async with start_server(drain_timeout=60) as server, connect(server.port) as wire:
        await wire.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await wire.head()
        server.stop.set()
        await server.task


async def test_an_idle_http2_connection_does_not_delay_the_end() -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
    async with start_server(drain_timeout=600) as server, connect(server.port) as wire:
        await wire.send(preface)
        assert await wire.reader.readexactly(9)  # the server's settings
        server.stop.set()
        await asyncio.wait_for(server.task, 60)


async def test_health_while_loading() -> None:
    release = asyncio.Event()
    registry = FakeRegistry(ready=False)
    async with (
        start_server(registry, tasks=[release.wait]) as server,
        httpx.AsyncClient(base_url=server.url) as http,
    ):
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 503


async def test_a_failed_load_ends_the_server() -> None:
    async def load() -> None:
        raise SourceError("no such file: model.gguf")

    listener = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(SourceError, match="no such file"):
        front = Front(FakeRegistry(), Metrics(device="fake"))
        await serve(Settings(), front, listener, tasks=[load])


SCRIPT = """
import asyncio, socket, sys
from emlxd.config import ServerSettings, Settings
from emlxd.metrics import Metrics
from emlxd.server import Front, serve
from tests.fakes import FakeRegistry, FakeWorker

async def main():
    worker = FakeWorker()
    worker.gate.clear()
    listener = socket.create_server(("127.0.0.1", 0))
    settings = Settings(server=ServerSettings(drain_timeout=float(sys.argv[1])))
    await serve(settings, Front(FakeRegistry(worker), Metrics(device="fake")), listener)

asyncio.run(main())
"""


@contextlib.contextmanager
def server_process(drain_timeout: float) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(drain_timeout)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        text=True,
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1].split("/")[0])
        yield process, port
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_in_order(number: signal.Signals) -> None:
    """The port answers as soon as it is announced."""
    with server_process(drain_timeout=0) as (process, port):
        async with connect(port) as wire:
            await running_stream(process, wire)
            process.send_signal(number)
            assert "error" in payloads(await wire.body())[-1]
        assert await asyncio.to_thread(process.wait) == 0


async def test_a_second_signal_ends_it_at_once() -> None:
    with server_process(drain_timeout=3600) as (process, port):
        async with connect(port) as wire:
            await running_stream(process, wire)
            process.send_signal(signal.SIGTERM)
            await refused(port)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait) == -signal.SIGTERM
