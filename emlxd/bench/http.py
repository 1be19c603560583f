"""The measurement: rounds of concurrent streaming requests, timed chunk by chunk."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from emlxd.bench.client import Rejected, post_events
from emlxd.bench.prompts import make_prompt
from emlxd.errors import UserError


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure. Every concurrency is measured with every prompt length.

    ``url`` is the server's, with or without ``/v1``. ``prompt_tokens`` is aimed at, ``shared_prefix``
    of them are the same in every prompt. ``max_tokens`` bounds each answer. A round is
    ``concurrency`` requests at once; ``repeats`` rounds are measured after ``warmup`` rounds that
    are not. ``extra`` is added to each request's body. ``timeout`` is the longest silence, in seconds.
    """

    url: str
    model: str
    api: Literal["chat", "completions"] = "chat"
    api_key: str | None = None
    concurrency: tuple[int, ...] = (1,)
    prompt_tokens: tuple[int, ...] = (128,)
    max_tokens: int = 128
    repeats: int = 3
    warmup: int = 1
    shared_prefix: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 300.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: seconds since it was sent at which text arrived, and its token counts.

    ``counted`` tells that the server counted the answer's tokens; else each chunk counts as one,
    and ``prompt_tokens`` is what was aimed at.
    """

    arrivals: tuple[float, ...]
    prompt_tokens: int
    completion_tokens: int
    counted: bool

    @property
    def ttft(self) -> float:
        return self.arrivals[0]

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the first one. None for an answer of one chunk."""
        took = self.arrivals[-1] - self.arrivals[0]
        return (self.completion_tokens - 1) / took if took > 0 and self.completion_tokens > 1 else None

    @property
    def prefill_rate(self) -> float:
        return self.prompt_tokens / self.ttft


@dataclass(frozen=True, slots=True)
class Spread:
    """Of repeated measurements: the middle one, the ends, and what 95 in 100 stay at or below."""

    median: float
    low: float
    high: float
    p95: float

    @classmethod
    def of(cls, values: list[float]) -> Spread | None:
        """None if there are no values."""
        if not values:
            return None
        ordered = sorted(values)
        nearest_rank = -(-95 * len(ordered) // 100) - 1
        return cls(median(ordered), ordered[0], ordered[-1], ordered[nearest_rank])


@dataclass(frozen=True, slots=True)
class Row:
    """The result for one concurrency and prompt length. Times in seconds, rates in tokens a second.

    ``prefill_rate`` and ``decode_rate`` are of one request, ``total_rate`` is all answer tokens of a
    round over the round's time.
    """

    concurrency: int
    prompt_tokens: int
    completion_tokens: int
    requests: int
    counted: bool
    ttft: Spread
    gap: Spread | None
    prefill_rate: Spread
    decode_rate: Spread | None
    total_rate: Spread


@dataclass(frozen=True, slots=True)
class BenchResult:
    """All rows of a run, in the order in which they were measured."""

    url: str
    model: str
    api: str
    max_tokens: int
    repeats: int
    shared_prefix: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class _Round:
    samples: list[Sample]
    took: float


async def run(options: BenchOptions, progress: Callable[[str], None] | None = None) -> BenchResult:
    """Measure the endpoint. ``progress`` is told what is about to be measured.

    Raises UserError if any request fails: a rate over failures means nothing.
    """
    report = progress or (lambda what: None)
    report("asking for a first token")
    bench = _Bench(options, ask_usage=await _reports_usage(options))
    rows = []
    for prompt_tokens in options.prompt_tokens:
        words = await bench.words_for(prompt_tokens)
        for concurrency in options.concurrency:
            report(f"{concurrency} at once, prompts of {prompt_tokens} tokens")
            for _ in range(options.warmup):
                await bench.round(concurrency, words)
            rounds = [await bench.round(concurrency, words) for _ in range(options.repeats)]
            rows.append(_row(concurrency, rounds))
    return BenchResult(
        url=options.url,
        model=options.model,
        api=options.api,
        max_tokens=options.max_tokens,
        repeats=options.repeats,
        shared_prefix=options.shared_prefix,
        rows=tuple(rows),
    )


async def _reports_usage(options: BenchOptions) -> bool:
    """Whether the server takes ``stream_options``. Some refuse a field that they do not know."""
    try:
        await _Bench(options, ask_usage=True).request(8, max_tokens=1)
    except Rejected as rejected:
        if rejected.status not in (400, 422):
            raise
        await _Bench(options, ask_usage=False).request(8, max_tokens=1)
        return False
    return True


class _Bench:
    """Sends requests. Every prompt of every run is a new one."""

    def __init__(self, options: BenchOptions, *, ask_usage: bool) -> None:
        self._options = options
        self._ask_usage = ask_usage
        self._url = _endpoint(options)
        self._headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}

    async def words_for(self, prompt_tokens: int) -> int:
        """How many words make a prompt of ``prompt_tokens``, the chat template's own tokens included."""
        sample = await self.request(prompt_tokens, max_tokens=1)
        return max(1, 2 * prompt_tokens - sample.prompt_tokens)

    async def round(self, concurrency: int, words: int) -> _Round:
        start = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                requests = [self.request(words, self._options.max_tokens) for _ in range(concurrency)]
                tasks = [group.create_task(request) for request in requests]
        except* UserError as failed:
            # One of them says it all, and the others are cancelled by now.
            raise failed.exceptions[0] from None
        return _Round([task.result() for task in tasks], time.perf_counter() - start)

    async def request(self, words: int, max_tokens: int) -> Sample:
        prompt = make_prompt(words, uuid.uuid4().hex, shared=self._options.shared_prefix)
        body = self._body(prompt, max_tokens)
        arrivals: list[float] = []
        usage: dict[str, Any] | None = None
        start = time.perf_counter()
        async with post_events(self._url, body, self._headers, self._options.timeout) as events:
            async for event in events:
                if _has_text(event):
                    arrivals.append(time.perf_counter() - start)
                usage = event.get("usage") or usage
        if not arrivals:
            raise UserError(f"{self._url} answered without any text")
        return Sample(
            arrivals=tuple(arrivals),
            prompt_tokens=usage["prompt_tokens"] if usage else words,
            completion_tokens=usage["completion_tokens"] if usage else len(arrivals),
            counted=usage is not None,
        )

    def _body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._options.model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        if self._options.api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self._ask_usage:
            body["stream_options"] = {"include_usage": True}
        return body | dict(self._options.extra)


def _endpoint(options: BenchOptions) -> str:
    base = options.url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise UserError(f"{options.url!r} is not a URL, expected one like http://127.0.0.1:8420")
    return f"{base}/v1/" + ("chat/completions" if options.api == "chat" else "completions")


def _has_text(event: dict[str, Any]) -> bool:
    choices = event.get("choices")
    if not choices:
        return False
    delta = choices[0].get("delta")
    if delta is None:
        return bool(choices[0].get("text"))
    # Servers disagree on what to call the text of a model that thinks.
    return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))


def _row(concurrency: int, rounds: list[_Round]) -> Row:
    samples = [sample for each in rounds for sample in each.samples]
    totals = [sum(sample.completion_tokens for sample in each.samples) / each.took for each in rounds]
    ttft = Spread.of([sample.ttft for sample in samples])
    prefill = Spread.of([sample.prefill_rate for sample in samples])
    total = Spread.of(totals)
    assert ttft is not None and prefill is not None and total is not None
    return Row(
        concurrency=concurrency,
        prompt_tokens=round(median(sample.prompt_tokens for sample in samples)),
        completion_tokens=round(median(sample.completion_tokens for sample in samples)),
        requests=len(samples),
        counted=all(sample.counted for sample in samples),
        ttft=ttft,
        gap=Spread.of([gap for sample in samples for gap in sample.gaps]),
        prefill_rate=prefill,
        decode_rate=Spread.of([sample.decode_rate for sample in samples if sample.decode_rate is not None]),
        total_rate=total,
    )
