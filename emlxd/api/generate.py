"""From a validated body to running generations: which worker, which parameters, whose events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from emlxd.api.exchange import Exchange, current_exchange
from emlxd.api.fields import GenerationBody
from emlxd.api.render import Said
from emlxd.api.surface import Services, Worker
from emlxd.core import (
    Event,
    Failed,
    Finished,
    GenerateRequest,
    ModelInfo,
    SamplingParams,
    TextPiece,
    Timing,
    Usage,
)
from emlxd.errors import ContextLengthExceeded, RequestError
from emlxd.metrics import Metrics
from emlxd.worker.mailbox import Generation

T = TypeVar("T")


class Source(Protocol):
    """Yields the events of one choice. A cancelled ``__anext__`` loses nothing."""

    async def __anext__(self) -> Said: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """``param`` is the field it came from, for errors."""

    tokens: Sequence[int]
    param: str


async def lease(services: Services, model: str) -> Worker:
    """The worker for ``model``, held until the exchange is over."""
    services.drain.check()
    return await current_exchange().cleanup.enter_async_context(services.registry.lease(model))


def submit(
    services: Services, worker: Worker, prompts: Sequence[Prompt], body: GenerationBody, limit: int | None
) -> list[Source]:
    """Start ``n`` generations for each prompt; choice ``i * n + j`` is the j-th for prompt i.

    Every prompt is checked before the first is submitted. What was submitted is cancelled when the
    exchange ends, also if a later one is refused.
    """
    counts = [token_room(worker.info, prompt, limit) for prompt in prompts]
    n = body.n or 1
    return [
        _start(services, worker, prompt, body, room, choice=i * n + j, nth=j)
        for i, (prompt, room) in enumerate(zip(prompts, counts, strict=True))
        for j in range(n)
    ]


def token_room(info: ModelInfo, prompt: Prompt, limit: int | None) -> int:
    """How many tokens may be generated: ``limit``, or what the context has left if that is less."""
    if not prompt.tokens:
        raise RequestError("The prompt is empty.", param=prompt.param, code="invalid_value")
    left = info.max_context - len(prompt.tokens)
    if left < 0 or (left == 0 and limit != 0):
        raise ContextLengthExceeded(len(prompt.tokens), info.max_context, param=prompt.param)
    return left if limit is None else min(limit, left)


def sampling_params(defaults: SamplingParams, body: GenerationBody, nth: int = 0) -> SamplingParams:
    """The model's defaults with what ``body`` asks for in their place.

    The n choices of one seeded request use successive seeds, so that they differ and repeat.
    """
    params = replace(
        defaults,
        temperature=_or(body.temperature, defaults.temperature),
        top_p=_or(body.top_p, defaults.top_p),
        top_k=max(_or(body.top_k, defaults.top_k), 0),  # -1 is a common way to say off
        min_p=_or(body.min_p, defaults.min_p),
        seed=None if body.seed is None else body.seed + nth,
    )
    # A nucleus of nothing keeps the likeliest token alone.
    return replace(params, temperature=0.0, top_p=1.0) if params.top_p == 0 else params


def _or(asked: T | None, default: T) -> T:
    return default if asked is None else asked


def _start(
    services: Services,
    worker: Worker,
    prompt: Prompt,
    body: GenerationBody,
    room: int,
    *,
    choice: int,
    nth: int,
) -> Source:
    if room == 0:
        return Nothing(len(prompt.tokens))
    exchange = current_exchange()
    request = GenerateRequest(
        id=f"{exchange.id}-{choice}",
        prompt=tuple(prompt.tokens),
        max_tokens=room,
        sampling=sampling_params(worker.info.sampling, body, nth),
        stop=tuple(body.stop),
        chunking=body.stream_chunks or worker.info.stream_chunks,
    )
    run = Run(worker.submit(request), services.metrics, worker.name, exchange)
    services.drain.add(run.generation)
    exchange.cleanup.callback(services.drain.discard, run.generation)
    exchange.cleanup.callback(run.close)
    return run


class Nothing:
    """The events of a request for zero tokens."""

    def __init__(self, prompt_tokens: int) -> None:
        self._events: list[Said] = [Finished("length", Usage(prompt_tokens), Timing())]

    async def __anext__(self) -> Said:
        if not self._events:
            raise StopAsyncIteration
        return self._events.pop()


class Run:
    """One generation being answered: raises its failure, counts its tokens, times its text."""

    def __init__(self, generation: Generation, metrics: Metrics, model: str, exchange: Exchange) -> None:
        self.generation = generation
        self._metrics = metrics
        self._model = model
        self._exchange = exchange
        self._spoke = False
        self._outcome: str | None = None

    async def __anext__(self) -> Said:
        event: Event = await self.generation.__anext__()
        if isinstance(event, Failed):
            self._end("error")
            raise event.error
        if isinstance(event, Finished):
            self._end(event.reason)
            self._metrics.generation_finished(self._model, event.usage, event.timing)
        elif isinstance(event, TextPiece) and not self._spoke:
            self._spoke = True
            self._metrics.first_token(self._model, self._exchange.seconds)
        return event

    def close(self) -> None:
        """Stop it if it still runs: nobody reads on."""
        self.generation.cancel()
        self._end("abort")

    def _end(self, outcome: str) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self._metrics.request_ended(self._model, self._exchange.route, outcome, self._exchange.seconds)


class Choices:
    """The events of several sources as they come, each with the index of its choice.

    Iterating is safe to cancel at any await, which is how a heartbeat interrupts it.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._open = len(sources)
        self._arrived: asyncio.Queue[tuple[int, Said | Exception]] = asyncio.Queue()
        if len(sources) > 1:
            pumps = [asyncio.create_task(self._pump(index)) for index in range(len(sources))]
            for pump in pumps:
                current_exchange().cleanup.callback(pump.cancel)

    def __aiter__(self) -> AsyncIterator[tuple[int, Said]]:
        return self

    async def __anext__(self) -> tuple[int, Said]:
        if not self._open:
            raise StopAsyncIteration
        index, event = await self._next()
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Finished):
            self._open -= 1
        return index, event

    async def _next(self) -> tuple[int, Said | Exception]:
        if len(self._sources) == 1:
            return 0, await self._sources[0].__anext__()
        return await self._arrived.get()

    async def _pump(self, index: int) -> None:
        try:
            while True:
                event = await self._sources[index].__anext__()
                self._arrived.put_nowait((index, event))
                if isinstance(event, Finished):
                    return
        except Exception as error:
            self._arrived.put_nowait((index, error))
