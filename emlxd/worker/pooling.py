"""Workers for pooling models: they read whole texts and write none, and give vectors, or scores of pairs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NoReturn, Protocol

import structlog

from emlxd.config import ModelSettings
from emlxd.core import GenerateRequest, ModelInfo, Shape, TextBatch, TokenizedText, WorkerStats
from emlxd.errors import RequestError, RequestTimedOut, Unavailable
from emlxd.text.dialect import Wishes
from emlxd.text.tokenizer import Tokenizer
from emlxd.worker.gate import Gate
from emlxd.worker.mailbox import Generation
from emlxd.worker.meters import Meters
from emlxd.worker.model_thread import Close, ModelThread
from emlxd.worker.packing import pack, turns
from emlxd.worker.pooling_jobs import Job, Lane, next_texts

log = structlog.get_logger(__name__)


class PoolingRunner(Protocol):
    """A model on the device."""

    @property
    def traces(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def lanes(self) -> int:
        """How many batches it reads side by side."""

    @property
    def shares_rows(self) -> bool:
        """Whether a row of a batch may have several texts."""

    def run(self, batches: Sequence[TextBatch]) -> list[list[list[float]]]:
        """For each batch, at most ``lanes`` of them, a vector for each text, row by row."""

    def out_of_memory(self, error: Exception) -> bool: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PoolingModel:
    """A loaded model. ``prompts``, by name, are put before texts of a kind; ``default_prompt`` names one."""

    info: ModelInfo
    runner: PoolingRunner
    tokenizer: Tokenizer
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


class PoolingWorker(ModelThread[Job]):
    """One loaded model that makes something of whole texts."""

    _doing = "read the texts"
    _smaller = "with fewer texts"
    _route = ""

    def __init__(self, settings: ModelSettings, load: Callable[[], PoolingModel], gate: Gate) -> None:
        """``load`` is called on the worker's thread."""
        super().__init__(settings.name, gate)
        self._max_queue = settings.max_queue
        self._timeout = settings.request_timeout
        self._load = load
        self._jobs: list[Job] = []
        self._model: PoolingModel | None = None
        self._weight_bytes = 0
        self._meters = Meters()

    @property
    def info(self) -> ModelInfo:
        return self._loaded_model.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded_model.tokenizer

    @property
    def busy(self) -> bool:
        return self._running > 0

    @property
    def _running(self) -> int:
        return sum(not job.over for job in self._jobs)

    def stats(self) -> WorkerStats | None:
        """How it stands, also after its end; None before its start is done. Requests count, not texts."""
        if self._model is None:
            return None
        return WorkerStats(
            running=self._running,
            waiting=self._inbox.qsize(),
            slots=self.info.slots,
            kv_tokens=0,
            kv_capacity=0,
            memory={"weights": self._weight_bytes},
            counts=self._meters.counts(),
        )

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> list[int]:
        """Raises RequestError."""
        self._refuse()

    async def shape(self, prompt: Sequence[int], wishes: Wishes) -> Shape:
        """Raises RequestError."""
        self._refuse()

    def admit(self, answers: int) -> None:
        """Raises RequestError."""
        self._refuse()

    def submit(self, request: GenerateRequest) -> Generation:
        """Raises RequestError."""
        self._refuse()

    def retune(self, settings: ModelSettings) -> None:
        """Takes over what may change while the model stays loaded."""
        self._max_queue = settings.max_queue
        self._timeout = settings.request_timeout

    @property
    def _loaded_model(self) -> PoolingModel:
        if self._model is None:
            raise self._unavailable()
        return self._model

    async def _read(self, texts: Sequence[TokenizedText]) -> list[list[float]]:
        """What the model makes of each text. If the caller is cancelled or late, the rest is not computed."""
        if not self.alive:
            raise self._unavailable()
        if self._running + self._inbox.qsize() > self._max_queue:
            raise self._full()
        job = Job(texts, Future())
        if not self._send(job):
            job.fail(self._unavailable())
        timeout = self._timeout
        try:
            async with asyncio.timeout(timeout or None):
                return await asyncio.wrap_future(job.future)
        except TimeoutError:
            raise RequestTimedOut(f"The answer took longer than {timeout:g} seconds.") from None

    def _refuse(self) -> NoReturn:
        raise RequestError(
            f"The model '{self.name}' does not write text; use it at {self._route}.", param="model"
        )

    def _open(self) -> None:
        self._model = self._load()
        self._weight_bytes = self._model.runner.weight_bytes

    def _serve(self) -> None:
        model = self._loaded_model
        while self._read_inbox():
            self._round(model.runner, model.info.max_context)

    def _fail_rest(self, error: Unavailable) -> None:
        while not self._inbox.empty():
            if isinstance(message := self._inbox.get(), Job):
                self._jobs.append(message)
        for job in self._jobs:
            job.fail(error)
        self._jobs = []

    def _free(self) -> None:
        self._loaded_model.runner.close()

    def _read_inbox(self) -> bool:
        """Takes all requests, waiting for one if there is nothing to compute. False when it is time to go."""
        while not self._inbox.empty() or not self._jobs:
            message = self._inbox.get()
            if isinstance(message, Close):
                return False
            self._heartbeat = time.monotonic()
            self._jobs.append(message)
        return True

    def _round(self, runner: PoolingRunner, max_context: int) -> None:
        """Some texts of every request, packed by length, a step at a time."""
        texts = next_texts(self._jobs)
        lengths = [len(job.texts[place].tokens) for job, place in texts]
        steps = pack(lengths, max_context, lanes=runner.lanes, shares_rows=runner.shares_rows)
        for turn in turns(steps, runner.lanes):
            lanes = [Lane.of(step, texts) for step in turn]
            lanes = [lane for lane in lanes if lane.members]
            if not lanes or self._closing:
                continue
            with self._gate:
                self._heartbeat = time.monotonic()
                self._step(runner, lanes)
        for job in self._jobs:
            job.finish()
        self._jobs = [job for job in self._jobs if not job.over]

    def _step(self, runner: PoolingRunner, lanes: Sequence[Lane]) -> None:
        members = [member for lane in lanes for member in lane.members]
        started = time.monotonic()
        try:
            made = runner.run([lane.batch for lane in lanes])
        except Exception as error:
            shed = runner.out_of_memory(error)
            log.exception("step failed", model=self.name, texts=len(members), out_of_memory=shed)
            for job, _ in members:
                job.fail(self._fault(out_of_memory=shed))
            return
        self._meters.step_seconds.observe(time.monotonic() - started)
        self._meters.step_batch_size.observe(len(members))
        self._meters.traces = runner.traces
        for (job, place), vector in zip(members, chain.from_iterable(made), strict=True):
            job.vectors[place] = vector
            job.finish()


class EmbeddingWorker(PoolingWorker):
    """Turns texts into vectors."""

    _route = "/v1/embeddings"

    @property
    def prompts(self) -> Mapping[str, str]:
        """What goes before texts, by the name of their kind."""
        return self._loaded_model.prompts

    def prompt(self, name: str | None) -> str:
        """What goes before a text of the kind ``name``; None is the model's usual kind.

        Raises RequestError for a kind that the model does not know.
        """
        model = self._loaded_model
        name = name or model.default_prompt
        if name is None:
            return ""
        if name not in model.prompts:
            known = ", ".join(map(repr, model.prompts)) or "none"
            raise RequestError(
                f"The model '{self.name}' has no prompt {name!r}; it has: {known}.",
                param="prompt_name",
                code="invalid_value",
            )
        return model.prompts[name]

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """A vector for each prompt. Raises QueueFull and Unavailable."""
        return await self._read([TokenizedText(tuple(prompt), len(prompt)) for prompt in prompts])


class RerankWorker(PoolingWorker):
    """Scores pairs of texts."""

    _route = "/v1/rerank"

    async def encode_pair(self, first: str, second: str) -> TokenizedText:
        """Both texts as the model reads them together."""
        length = len(first) + len(second)
        return await self._in_text_thread(lambda: self.tokenizer.encode_pair(first, second), length)

    async def score(self, pairs: Sequence[TokenizedText]) -> list[float]:
        """How well each pair goes together, from 0 to 1. Raises QueueFull and Unavailable."""
        return [score for (score,) in await self._read(pairs)]
