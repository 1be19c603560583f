"""A whole daemon in the test's own event loop, over real HTTP, with fake workers and counted memory."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from emlxd.config import ModelSettings
from emlxd.config_file import load
from emlxd.core import Distribution, WorkerCounts, WorkerStats
from emlxd.errors import ModelFormatError
from emlxd.metrics import Metrics
from emlxd.operate import Operator
from emlxd.reload.reloader import Reloader
from emlxd.server import Front, serve
from tests.fakes import FakeWorker
from tests.residents import House

DAMAGED = 255
"""A model with so many slots cannot be loaded."""

Models = Mapping[str, Mapping[str, Any]]


class HouseWorker(FakeWorker):
    """A fake worker that is loaded and closed."""

    def __init__(self, settings: ModelSettings, house: House) -> None:
        super().__init__(name=settings.name)
        self.settings = settings
        self.alive = False
        self.heartbeat_age = 0.0
        self._house = house

    async def start(self) -> None:
        self._house.starts.append(self.name)
        await self._house.gate.wait()
        if failure := self._house.failures.get(self.name):
            raise failure
        if self.settings.slots == DAMAGED:
            raise ModelFormatError(f"{self.name} is damaged")
        self.alive = True

    def stats(self) -> WorkerStats:
        """Every request counts as answered."""
        none, tokens = Distribution((), (0,), 0.0), len(self.submitted) * len(self.words)
        counts = WorkerCounts(0, 0, 0, none, none, Distribution((), (tokens,), 0.0))
        return WorkerStats(len(self._tasks), 0, self.info.slots, 0, 0, {}, counts)

    def retune(self, settings: ModelSettings) -> None:
        self.settings = settings

    async def close(self) -> None:
        assert not self._tasks, "closed under a request"
        self._house.closed.append(self)  # type: ignore[arg-type]
        self.alive = False


class FakeDaemon:
    """``write`` changes its file. Memory is 100 bytes a model."""

    def __init__(self, path: Path, models: Models, budget: int, server: Mapping[str, Any]) -> None:
        self.path = path
        self.house = House(budget=budget, make=HouseWorker)
        self.write(models, server=server)
        self.settings = load(path, {})
        self.registry = self.house.registry(*self.settings.models)
        self.metrics = Metrics(device="fake")
        self.front = Front(self.registry, self.metrics)
        self.reloader = Reloader(
            path,
            self.settings,
            self.registry,
            self.metrics,
            apply=self.front.prepare,
            budget=lambda _: self.house.budget,
        )
        self.front.operator = Operator(self.registry, self.reloader, dict)
        self.stop = asyncio.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def write(self, models: Models, server: Mapping[str, Any] | None = None) -> None:
        entries = [
            {"name": name, "source": {"pypi": "x==1", "file": "x.gguf"}, "prefill_chunk": 100} | dict(rest)
            for name, rest in models.items()
        ]
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"models": entries, "server": {"heartbeat": 0} | dict(server or {})}))
        os.replace(part, self.path)


@asynccontextmanager
async def fake_daemon(
    path: Path, models: Models, *, budget: int = 1000, **server: Any
) -> AsyncIterator[FakeDaemon]:
    """Serves until the block ends; startup models are loaded when it begins."""
    daemon = FakeDaemon(path, models, budget, server)
    await daemon.registry.load()
    task = asyncio.create_task(serve(daemon.settings, daemon.front, daemon.listener, stop=daemon.stop))
    try:
        yield daemon
    finally:
        daemon.stop.set()
        await task
        await daemon.registry.close()
