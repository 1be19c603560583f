"""A real server on a loopback port, in the test's own event loop, in front of a fake registry."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from emlxd.config import ServerSettings, Settings
from emlxd.metrics import Metrics
from emlxd.server import Front, Task, serve
from emlxd.tracing import Tracer
from tests.fakes import FakeRegistry, FakeWorker


@dataclass
class Server:
    port: int
    registry: FakeRegistry
    metrics: Metrics
    stop: asyncio.Event
    task: asyncio.Task[None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def worker(self) -> FakeWorker:
        return self.registry.worker

    def metric(self, name: str, **labels: str) -> float:
        return sample_value(self.metrics, name, labels) or 0.0


def sample_value(metrics: Metrics, name: str, labels: Mapping[str, str]) -> float | None:
    """What a scrape reads of one sample."""
    families = text_string_to_metric_families(metrics.exposition("")[0].decode())
    samples = (sample for family in families for sample in family.samples)
    return next((one.value for one in samples if (one.name, one.labels) == (name, labels)), None)


@asynccontextmanager
async def start_server(
    registry: Any = None,
    tasks: Sequence[Task] = (),
    sections: Mapping[str, Any] = MappingProxyType({}),
    tracer: Tracer | None = None,
    **server: Any,
) -> AsyncIterator[Server]:
    """``server`` sets what is in that section of the configuration, ``sections`` the others."""
    settings = Settings(server=ServerSettings(**{"heartbeat": 0, "drain_timeout": 0} | server), **sections)
    registry, metrics, stop = registry or FakeRegistry(), Metrics(device="fake"), asyncio.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    task = asyncio.create_task(
        serve(settings, Front(registry, metrics, tracer=tracer), listener, tasks=tasks, stop=stop)
    )
    try:
        yield Server(port, registry, metrics, stop, task)
    finally:
        stop.set()
        with contextlib.suppress(Exception):
            await task


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with start_server() as running:
        yield running


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    # Reading the certificate store takes longer than a test, and nothing here uses TLS.
    plain = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=20, http_client=plain
    ) as sdk:
        yield sdk


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=20, verify=False) as plain:
        yield plain
