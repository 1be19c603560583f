"""The models of config.yaml, by name and alias: loads them, hands their workers out, closes them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import structlog

from emlxd.config import ModelSettings
from emlxd.errors import ModelNotFound, Unavailable
from emlxd.worker.worker import Worker

log = structlog.get_logger(__name__)

State = Literal["waiting", "loading", "loaded", "failed"]


@dataclass(slots=True)
class ModelEntry:
    """A model of the configuration, loaded or not. ``created`` is in Unix seconds."""

    settings: ModelSettings
    created: int = field(default_factory=lambda: int(time.time()))
    state: State = "waiting"
    worker: Worker | None = None

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def aliases(self) -> Sequence[str]:
        return self.settings.aliases


class Registry:
    """Only what is in the configuration is served. Lives on the event loop."""

    def __init__(
        self, models: Sequence[ModelSettings], make_worker: Callable[[ModelSettings], Worker]
    ) -> None:
        self._entries = {model.name: ModelEntry(model) for model in models}
        self._names = {name: e for e in self._entries.values() for name in (e.name, *e.aliases)}
        self._make_worker = make_worker

    @property
    def models(self) -> Sequence[ModelEntry]:
        return list(self._entries.values())

    @property
    def ready(self) -> bool:
        """Whether every model answers."""
        return all(entry.worker is not None and entry.worker.alive for entry in self._entries.values())

    async def load(self) -> None:
        """Loads the models one after the other. Raises what the first one that fails raises."""
        for entry in self._entries.values():
            entry.state = "loading"
            started = time.monotonic()
            worker = self._make_worker(entry.settings)
            try:
                await worker.start()
            except BaseException:
                entry.state = "failed"
                raise
            entry.worker, entry.state = worker, "loaded"
            log.info("model loaded", model=entry.name, seconds=round(time.monotonic() - started, 2))

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[Worker]:
        """A worker that stays while the lease is held. Raises ModelNotFound and Unavailable."""
        entry = self._names.get(name)
        if entry is None:
            raise ModelNotFound(name)
        if entry.worker is None:
            raise Unavailable(f"The model '{entry.name}' is {entry.state}.", retry_after=2)
        yield entry.worker

    async def close(self) -> None:
        """Ends every worker and frees its model."""
        for entry in self._entries.values():
            if entry.worker is not None:
                await entry.worker.close()
                entry.worker, entry.state = None, "waiting"
