"""From a validated body to running generations: which worker, which parameters, whose events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import structlog

from emlxd.api.drain import Running
from emlxd.api.exchange import Exchange, current_exchange
from emlxd.api.fields import SamplingBody
from emlxd.api.prompts import Prompt
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
    ToolCallPiece,
    Usage,
)
from emlxd.errors import ContextLengthExceeded, RequestError
from emlxd.metrics import Metrics
from emlxd.worker.mailbox import Generation

_log = structlog.get_logger("emlxd.http")

MOST_ANSWERS: Final = 2048  # of one request
NEXT_TO_NOTHING: Final = 1e-6  # of a temperature or a probability

T = TypeVar("T")


async def lease(services: Services, model: str) -> Worker:
    """The worker for ``model``, held until the exchange is over."""
    services.drain.check()
    exchange = current_exchange()
    worker = await exchange.cleanup.enter_async_context(services.registry.lease(model))
    exchange.tally.model = worker.name
    return worker


def count_prompts(services: Services, lengths: Iterable[int]) -> None:
    """Counts prompts that were read for something else than an answer, by their tokens."""
    tally = current_exchange().tally
    for length in lengths:
        services.metrics.prompt_read(tally.model, Usage(length))
        tally.prompt_tokens += length


def submit(services: Services, worker: Worker, prompts: Sequence[Prompt], body: SamplingBody) -> list[Run]:
    """Start a request for each prompt; its answers share it.

    Every prompt is checked before the first is submitted. What was submitted is cancelled when the
    exchange ends, also if a later one fails.
    """
    exchange = current_exchange()
    requests = [
        generate_request(worker.info, prompt, body, f"{exchange.generation_id}-{place}")
        for place, prompt in enumerate(prompts)
    ]
    worker.admit(_answers(requests))
    exchange.tally.asked = requests[0]
    if services.settings.log.prompts:
        for prompt in prompts:
            text = worker.tokenizer.decode(prompt.tokens, skip_special_tokens=False)
            _log.info("prompt", model=worker.name, text=text)
    return [_start(services, worker, request, exchange) for request in requests]


def _answers(requests: Sequence[GenerateRequest]) -> int:
    """Of all of them together. Raises RequestError for more than one request may ask for."""
    count = sum(request.n for request in requests)
    if count > MOST_ANSWERS:
        raise RequestError(
            f"Invalid value for 'n': {len(requests)} prompts with {requests[0].n} answers each are {count} "
            f"answers, expected at most {MOST_ANSWERS}.",
            param="n",
            code="invalid_value",
        )
    return count


def generate_request(info: ModelInfo, prompt: Prompt, body: SamplingBody, id: str) -> GenerateRequest:
    """What ``body`` asks for. Raises RequestError for what this model cannot do."""
    return GenerateRequest(
        id=id,
        prompt=tuple(prompt.tokens),
        max_tokens=token_room(info, prompt, body.token_limit),
        sampling=sampling_params(info, body),
        stop=tuple(body.stop_strings),
        n=body.answers,
        # Evaluation harnesses ask for one token only to get the prompt's scores, and count on its entry.
        ignore_eos=bool(body.ignore_eos) or (prompt.scored and body.token_limit == 1),
        prompt_logprobs=body.likeliest if prompt.scored else None,
        chunking=body.stream_chunks or info.stream_chunks,
        shape=prompt.shape,
        continues=prompt.continues,
    )


def token_room(info: ModelInfo, prompt: Prompt, limit: int | None) -> int:
    """How many tokens may be generated: ``limit``, or what the context has left if that is less."""
    if not prompt.tokens:
        raise RequestError("The prompt is empty.", param=prompt.param, code="invalid_value")
    left = info.max_context - len(prompt.tokens)
    if left < 0 or (left == 0 and limit != 0):
        raise ContextLengthExceeded(len(prompt.tokens), info.max_context, param=prompt.param)
    return left if limit is None else min(limit, left)


def sampling_params(info: ModelInfo, body: SamplingBody) -> SamplingParams:
    """The model's defaults with what ``body`` asks for in their place."""
    defaults = info.sampling
    params = replace(
        defaults,
        temperature=_or(body.temperature, defaults.temperature),
        top_p=_or(body.top_p, defaults.top_p),
        top_k=max(_or(body.top_k, defaults.top_k), 0),  # -1 is a common way to say off
        min_p=_or(body.min_p, defaults.min_p),
        presence_penalty=_or(body.presence_penalty, defaults.presence_penalty),
        frequency_penalty=_or(body.frequency_penalty, defaults.frequency_penalty),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=_logit_bias(info, body.logit_bias or {}),
        min_tokens=_min_tokens(body),
        logprobs=body.likeliest,
        seed=body.seed,
    )
    # A nucleus of nothing keeps the likeliest token alone. What is next to nothing would overflow.
    next_to_nothing = params.top_p < NEXT_TO_NOTHING or 0 < params.temperature < NEXT_TO_NOTHING
    return replace(params, temperature=0.0, top_p=1.0) if next_to_nothing else params


def _logit_bias(info: ModelInfo, biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for token in biases:
        if int(token) >= info.vocab_size:
            raise RequestError(
                f"Invalid value for 'logit_bias': token id {token} is out of range; "
                f"this model's are 0 to {info.vocab_size - 1}.",
                param="logit_bias",
                code="invalid_value",
            )
    return tuple((int(token), bias) for token, bias in biases.items())


def _min_tokens(body: SamplingBody) -> int:
    count = body.min_tokens or 0
    if body.token_limit is not None and count > body.token_limit:
        raise RequestError(
            f"Invalid value for 'min_tokens': {count} is more than the {body.token_limit} tokens allowed.",
            param="min_tokens",
            code="invalid_value",
        )
    return count


def _or(asked: T | None, default: T) -> T:
    return default if asked is None else asked


def _start(services: Services, worker: Worker, request: GenerateRequest, exchange: Exchange) -> Run:
    run = Run(worker.submit(request), services.metrics, worker.name, exchange)
    running = Running(
        exchange.generation_id, exchange.request_id, worker.name, exchange.route, run.generation
    )
    services.drain.add(running)
    exchange.cleanup.callback(services.drain.discard, running)
    exchange.cleanup.callback(run.close)
    return run


class Run:
    """One request being answered: raises its failure, counts its tokens, times its text.

    A cancelled ``__anext__`` loses nothing.
    """

    def __init__(self, generation: Generation, metrics: Metrics, model: str, exchange: Exchange) -> None:
        self.generation = generation
        self._metrics = metrics
        self._model = model
        self._exchange = exchange
        self._spoke = False
        self._unfinished = generation.request.n
        self._counted = Usage()

    async def __anext__(self) -> Said:
        event: Event = await self.generation.__anext__()
        if isinstance(event, Failed):
            self._cut_off("error")
            raise event.error
        if isinstance(event, Finished):
            self._finish(event)
        elif isinstance(event, TextPiece | ToolCallPiece) and not self._spoke:
            self._spoke = True
            seconds = self._exchange.seconds
            self._metrics.first_token(self._model, seconds)
            if self._exchange.tally.first_token is None:
                self._exchange.tally.first_token = seconds
        return event

    @property
    def ended(self) -> bool:
        return not self._unfinished

    def close(self) -> None:
        """Stop it if it still runs: nobody reads on."""
        self.generation.cancel()
        self._cut_off("abort")

    def _finish(self, event: Finished) -> None:
        usage = event.usage
        if self._unfinished == self.generation.request.n:
            self._metrics.prompt_read(self._model, usage)
        else:  # the prompt is counted
            usage = replace(usage, prompt_tokens=0, cached_tokens=0)
        self._count(usage)
        self._metrics.generation_finished(self._model, usage, event.timing)
        self._end(event.reason, 1)

    def _cut_off(self, outcome: str) -> None:
        """Counts what the answers took that did not come to their end."""
        if self._unfinished:
            rest = self.generation.spent.beyond(self._counted)
            self._count(rest)
            self._metrics.cut_off(self._model, rest)
            self._end(outcome, self._unfinished)

    def _count(self, usage: Usage) -> None:
        self._counted += usage
        tally = self._exchange.tally
        tally.prompt_tokens += usage.prompt_tokens
        tally.cached_tokens += usage.cached_tokens
        tally.completion_tokens += usage.completion_tokens

    def _end(self, outcome: str, answers: int) -> None:
        self._unfinished -= answers
        self._exchange.tally.finish_reasons += [outcome] * answers
        for _ in range(answers):
            self._metrics.request_ended(self._model, self._exchange.route, outcome, self._exchange.seconds)


class Events:
    """The events of several requests as they come, each with the number of its prompt.

    Iterating is safe to cancel at any await, which is how a heartbeat interrupts it.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._open = len(runs)
        # Bounded: what is not read has to wait in the mailbox, where its size is watched.
        self._arrived: asyncio.Queue[tuple[int, Said | Exception | None]] = asyncio.Queue(len(runs))
        if len(runs) > 1:
            pumps = [asyncio.create_task(self._pump(prompt)) for prompt in range(len(runs))]
            for pump in pumps:
                current_exchange().cleanup.callback(pump.cancel)

    def __aiter__(self) -> AsyncIterator[tuple[int, Said]]:
        return self

    async def __anext__(self) -> tuple[int, Said]:
        while self._open:
            prompt, event = await self._next()
            if isinstance(event, Exception):
                raise event
            if event is not None:
                return prompt, event
            self._open -= 1
        raise StopAsyncIteration

    async def until(self, moment: float) -> list[tuple[int, Said]]:
        """What has come when it is ``moment`` on the loop's clock, or all of it sooner.

        Of several requests nothing, and at once.
        """
        if len(self._runs) > 1:
            return []
        (run,) = self._runs
        if not run.ended and (left := moment - asyncio.get_running_loop().time()) > 0:
            await run.generation.complete(left)
        came = []
        while run.generation.ready:
            came.append((0, await run.__anext__()))
        return came

    async def _next(self) -> tuple[int, Said | Exception | None]:
        """The next event and its prompt. None is the end of that prompt's events."""
        if len(self._runs) > 1:
            return await self._arrived.get()
        (run,) = self._runs
        return 0, None if run.ended else await run.__anext__()

    async def _pump(self, prompt: int) -> None:
        run = self._runs[prompt]
        try:
            while not run.ended:
                await self._arrived.put((prompt, await run.__anext__()))
            await self._arrived.put((prompt, None))
        except Exception as error:
            await self._arrived.put((prompt, error))
