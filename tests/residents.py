"""Workers without a model, a clock that a test turns, and memory that is only counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from emlxd.config import ModelSettings, Source
from emlxd.core import WorkerStats
from emlxd.memory import Needs
from emlxd.registry import Registry
from emlxd.residency import Residents


def model(name: str, **changes: Any) -> ModelSettings:
    """A model whose bytes are its ``prefill_chunk``."""
    return ModelSettings.model_validate(
        {"name": name, "source": Source(pypi=f"{name}==1", file="x.gguf"), "prefill_chunk": 100} | changes
    )


class StubWorker:
    """Loads when its gate is open, and fails if told to."""

    def __init__(self, settings: ModelSettings, house: House) -> None:
        self.settings = settings
        self.name = settings.name
        self.alive = False
        self.heartbeat_age = 0.0
        self._house = house

    def stats(self) -> WorkerStats | None:
        return None

    async def start(self) -> None:
        self._house.starts.append(self.name)
        await self._house.gate.wait()
        if failure := self._house.failures.get(self.name):
            raise failure
        self.alive = True

    def retune(self, settings: ModelSettings) -> None:
        self.settings = settings

    async def close(self) -> None:
        assert self not in self._house.closed, "a worker is closed once"
        self._house.closed.append(self)
        self.alive = False
        await asyncio.sleep(0)


ON_DEMAND: dict[str, Any] = {"load": "on_demand"}


@dataclass
class House:
    """A registry with all that it is handed. ``needs`` overrides a model's bytes."""

    budget: int = 1000
    now: float = 0.0
    starts: list[str] = field(default_factory=list)
    closed: list[StubWorker] = field(default_factory=list)
    failures: dict[str, Exception] = field(default_factory=dict)
    unprepared: dict[str, Exception] = field(default_factory=dict)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    make: Callable[[ModelSettings, House], Any] = StubWorker

    def __post_init__(self) -> None:
        self.gate.set()

    async def prepare(self, settings: ModelSettings) -> Needs:
        await asyncio.sleep(0)
        if failure := self.unprepared.get(settings.name):
            raise failure
        return Needs(weights=settings.prefill_chunk)

    def registry(self, *models: ModelSettings, stall_timeout: float = 0.0) -> Registry:
        self.residents = Residents(
            self.budget, lambda settings: self.make(settings, self), self.prepare, lambda: self.now
        )
        return Registry(models, self.residents, stall_timeout=stall_timeout, now=lambda: self.now)

    @property
    def in_memory(self) -> list[str]:
        return [resident.settings.name for resident in self.residents if not resident.retired]


async def settle() -> None:
    """Lets everything run that can run without time passing."""
    for _ in range(20):
        await asyncio.sleep(0)


async def use(registry: Registry, name: str) -> str:
    """One request: the name of the worker that it got."""
    async with registry.lease(name) as worker:
        return worker.name
