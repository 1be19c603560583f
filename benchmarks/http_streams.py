"""How much of a fast device is left behind HTTP: a daemon whose model takes a given time a step.

    python benchmarks/http_streams.py [--step MILLISECONDS] [--streams N] [--tokens N]

All but the device is real. Prints the tokens a second of all streams together, what share of the device's
they are, the processor time that a token takes the daemon, and the longest gap of a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import socket
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import structlog
from instant import instant_worker

from emlxd.config_file import load
from emlxd.memory import Needs
from emlxd.metrics import Metrics
from emlxd.registry import Registry
from emlxd.residency import Residents
from emlxd.server import Front, serve

ROUNDS = 4  # the first warms up


@dataclass(frozen=True)
class Stream:
    tokens: int
    gap: float


async def serve_instant(listener: socket.socket, parent: Connection, streams: int, seconds: float) -> None:
    async def needs(_: object) -> Needs:
        return Needs(weights=1)

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(json.dumps({"models": [{"name": "instant", "source": {"path": folder}}]}))
        settings = load(config, {})
    residents = Residents(1, lambda one: instant_worker(one.name, streams, seconds), needs, time.monotonic)
    registry = Registry(settings.models, residents, stall_timeout=0, now=time.monotonic)
    await registry.load()
    threading.Thread(target=tell_processor_time, args=(parent,), daemon=True).start()
    await serve(settings, Front(registry, Metrics(device="none")), listener)


def tell_processor_time(parent: Connection) -> None:
    while True:
        parent.send(time.process_time())
        parent.recv()


def daemon(listener: socket.socket, parent: Connection, streams: int, seconds: float) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    asyncio.run(serve_instant(listener, parent, streams, seconds))


async def ask(port: int, tokens: int) -> Stream:
    """Reads an answer without parsing it, which would cost as much as writing it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = {"model": "instant", "prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    data = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    writer.write(f"{head}{len(data)}\r\n\r\n".encode() + data)
    tail, last, gap = b"", 0.0, 0.0
    while b"[DONE]" not in tail:
        part = await reader.read(1 << 16)
        if not part:
            raise ConnectionError(tail.decode())
        now = time.perf_counter()
        gap = max(gap, now - last) if last else gap
        tail, last = (tail + part)[-1000:], now
    writer.close()
    return Stream(int(tail.split(b'"completion_tokens":')[1].split(b",")[0]), gap)


async def ask_all(port: int, streams: int, tokens: int) -> list[Stream]:
    return await asyncio.gather(*(ask(port, tokens) for _ in range(streams)))


def report(streams: list[Stream], took: float, used: float, step: float) -> None:
    tokens = sum(stream.tokens for stream in streams)
    share = tokens / len(streams) * step / took
    gap = max(stream.gap for stream in streams)
    print(f"{tokens / took:,.0f} tok/s, {share:.0%} of the device;", end=" ")
    print(f"{used / tokens * 1e6:.0f} µs a token; longest gap {gap * 1000:.0f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--step", type=float, default=2.0, help="milliseconds of the device (default: 2)")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1000)
    options = parser.parse_args()
    child, there = multiprocessing.Pipe()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    arguments = (listener, there, options.streams, options.step / 1000)
    process = multiprocessing.Process(target=daemon, args=arguments)
    process.start()
    listener.close()
    used = child.recv()  # it is ready
    for round in range(ROUNDS):
        started = time.perf_counter()
        streams = asyncio.run(ask_all(port, options.streams, options.tokens))
        took, before = time.perf_counter() - started, used
        child.send(None)
        used = child.recv()
        if round:
            report(streams, took, used - before, options.step / 1000)
    process.terminate()


main()
