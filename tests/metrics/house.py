"""A server over HTTP with real workers on fake runners: everything but the model."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from emlxd.config import ModelSettings
from emlxd.core import ModelInfo, SamplingParams
from emlxd.memory import Needs
from emlxd.readings import Readings
from emlxd.registry import Registry
from emlxd.residency import Residents
from emlxd.text.chat_template import ChatTemplate
from emlxd.tracing import Tracer
from emlxd.worker.gate import Gate
from emlxd.worker.load import Model
from emlxd.worker.worker import Worker, WorkerOptions
from tests.api.conftest import Server, start_server
from tests.residents import model
from tests.worker.fakes import LETTERS, FakeRunner, letters_tokenizer

MAX_CONTEXT = 1024
MEMORY = {"active": 11, "peak": 22, "cached": 33}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class HeldRunner(FakeRunner):
    """Counts up through the alphabet, for ever; a test can hold its decode steps."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots, lambda tokens: len(tokens) % 26, max_context=MAX_CONTEXT, blocks=8)
        self.free = threading.Event()
        self.free.set()
        self.hold_after = 0  # decode steps, if not 0

    def forward(self, positions: Sequence[int | None]) -> None:
        if self.hold_after and len(self.batches) == self.hold_after:
            self.free.clear()
        assert self.free.wait(20)
        super().forward(positions)


@dataclass
class House:
    """``runners`` by model, the newest of each."""

    server: Server
    registry: Registry
    http: httpx.AsyncClient
    runners: dict[str, HeldRunner] = field(default_factory=dict)

    async def complete(self, name: str = "m", *, prompt: str = "abc", **body: object) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": name, "prompt": prompt} | body)

    async def scrape(self) -> dict[str, float]:
        """Every sample by its name and labels, as in ``emlxd_slots{model="m"}``."""
        return {
            _key(sample.name, sample.labels): sample.value
            for family in text_string_to_metric_families((await self.http.get("/metrics")).text)
            for sample in family.samples
        }


def _key(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name


@asynccontextmanager
async def house(
    *models: ModelSettings, tracer: Tracer | None = None, **settings: object
) -> AsyncIterator[House]:
    """``settings`` are sections of the configuration. Models are loaded before the block starts."""
    models = models or (model("m", slots=2),)
    runners: dict[str, HeldRunner] = {}
    gate = Gate()

    def make_worker(settings: ModelSettings) -> Worker:
        runners[settings.name] = runner = HeldRunner(settings.slots)
        info = ModelInfo("fake", MAX_CONTEXT, settings.slots, len(LETTERS), SamplingParams(), "token")
        loaded = Model(info, runner, letters_tokenizer(), ChatTemplate(TEMPLATE, {}))
        options = WorkerOptions(settings.name, settings.max_queue, prefill_chunk=512, prefill_slice=0.25)
        return Worker(options, lambda: loaded, gate)

    async def prepare(settings: ModelSettings) -> Needs:
        return Needs(weights=1)

    registry = Registry(models, Residents(1000, make_worker, prepare))
    await registry.load()
    async with (
        start_server(registry, sections=settings, tracer=tracer) as server,
        httpx.AsyncClient(base_url=server.url, timeout=20, verify=False) as http,
    ):
        server.metrics.add_collector(Readings(registry, lambda: MEMORY))
        yield House(server, registry, http, runners)
        for runner in runners.values():
            runner.free.set()
        await registry.close()
