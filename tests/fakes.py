"""Stand-ins for a registry and its workers: no model, no thread, no clock.

A fake model reads its prompt byte by byte and answers ``one two three ...`` word by word. A test
can change the words, hold the worker at a gate, or make it fail, and asks it what it was given.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import hypot
from typing import Any

from emlxd.core import (
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    Kind,
    ModelCard,
    ModelInfo,
    PromptScored,
    SamplingParams,
    Shape,
    TextPiece,
    Timing,
    TokenizedText,
    TokenLogprob,
    ToolCallPiece,
    Usage,
)
from emlxd.errors import EmlxdError, ModelNotFound, QueueFull, RequestError
from emlxd.text.dialect import Wishes
from emlxd.worker.mailbox import Generation

WORDS = ("one", " two", " three", " four", " five", " six")


class ByteTokenizer:
    """A token is a byte."""

    text_bytes = tuple(bytes([token]) for token in range(256))
    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def truncate(self, ids: Sequence[int], limit: int) -> list[int]:
        return list(ids[:limit])


def fake_info(**changes: Any) -> ModelInfo:
    defaults: dict[str, Any] = {
        "architecture": "fake",
        "max_context": 1000,
        "slots": 4,
        "vocab_size": 256,
        "sampling": SamplingParams(temperature=0.7, top_p=0.9, top_k=40),
    }
    return ModelInfo(**defaults | changes)


@dataclass
class FakeWorker:
    """Says ``words``, or ``says`` if there is any, which may be ``cut_off``. Fails with ``failure`` after
    ``fail_after`` words; waits for ``gate`` after ``free`` events. With ``patient`` others run between its
    words."""

    name: str = "org/fake-1b"
    info: ModelInfo = field(default_factory=fake_info)
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    words: Sequence[str] = WORDS
    says: Sequence[TextPiece | ToolCallPiece] = ()
    cut_off: bool = False
    failure: EmlxdError | None = None
    fail_after: int = 0
    free: int = 0
    patient: bool = False
    max_running: int = 256
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()
        self.chats: list[dict[str, Any]] = []
        self.wishes: list[Wishes] = []
        self.encoded: list[tuple[str, bool]] = []
        self.submitted: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.idle = asyncio.Event()
        self.idle.set()
        self.busy = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> list[int]:
        self.chats.append(
            {
                "messages": list(messages),
                "begins": add_generation_prompt,
                "continues": continue_final_message,
                "kwargs": template_kwargs,
                "tools": tools,
            }
        )
        text = "".join(f"{message['role']}:{message.get('content')}\n" for message in messages)
        return list(text.encode())

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append((text, add_special_tokens))
        return list(text.encode())

    async def shape(self, prompt: Sequence[int], wishes: Wishes) -> Shape:
        self.wishes.append(wishes)
        return Shape(grammar=wishes.grammar)

    def admit(self, answers: int) -> None:
        if len(self._tasks) >= self.max_running:
            raise QueueFull("The queue is full.")

    def submit(self, request: GenerateRequest) -> Generation:
        self.submitted.append(request)
        generation = Generation(request, self._cancel)
        task = asyncio.create_task(self._answer(generation))
        self._tasks[request.id] = task
        task.add_done_callback(lambda _: self._ended(request.id))
        self.idle.clear()
        self.busy.set()
        return generation

    def _cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        if task := self._tasks.get(request_id):
            task.cancel()

    def _ended(self, request_id: str) -> None:
        del self._tasks[request_id]
        if not self._tasks:
            self.busy.clear()
            self.idle.set()

    async def _answer(self, generation: Generation) -> None:
        for place, event in enumerate(self._events(generation.request)):
            if place >= self.free:
                await self.gate.wait()
            if self.patient:
                await asyncio.sleep(0)
            generation.deliver([event])

    def _events(self, request: GenerateRequest) -> list[Event]:
        """The answers' events word by word in turn, as a batch gives them."""
        answers = [self._answer_events(request, index) for index in range(request.n)]
        events = [event for turn in zip_longest(*answers) for event in turn if event is not None]
        if request.prompt_logprobs is not None:
            scores = [score(token, request.prompt_logprobs) for token in request.prompt[1:]]
            events.insert(0, PromptScored((None, *scores)))
        return [*events, Failed(self.failure)] if self.failure is not None else events

    def _answer_events(self, request: GenerateRequest, index: int) -> list[Event]:
        if self.says:
            called = any(isinstance(said, ToolCallPiece) for said in self.says)
            usage = Usage(len(request.prompt), len(self.says), reasoning_tokens=2)
            reason: FinishReason = "tool_calls" if called else "stop"
            end = Finished("length" if self.cut_off else reason, usage, Timing(), index=index)
            return [*(replace(said, index=index) for said in self.says), end]
        words = list(self.words[: request.max_tokens])
        reason = "length" if len(words) == request.max_tokens else "stop"
        text, stop = _cut("".join(words), request.stop)
        if self.failure is not None:
            return [TextPiece(word, index) for word in words[: self.fail_after]]
        pieces: list[Event] = []
        for word in words:
            piece, text = text[: len(word)], text[len(word) :]
            if piece:
                pieces.append(TextPiece(piece, index, _logprobs(piece, request.sampling.logprobs)))
        usage = Usage(len(request.prompt), len(words), cached_tokens=1)
        return [*pieces, Finished("stop" if stop else reason, usage, Timing(0.1, 0.2, 0.3), stop, index)]


@dataclass
class FakeEmbedder(FakeWorker):
    """The vector of a prompt is its first token, its length, and zeros, scaled to length 1."""

    size: int = 4
    prompts: Mapping[str, str] = field(default_factory=dict)

    def prompt(self, name: str | None) -> str:
        if name is not None and name not in self.prompts:
            raise RequestError(f"no prompt {name!r}", param="prompt_name")
        return self.prompts[name] if name else ""

    async def embed(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
        vectors = [[float(prompt[0]), float(len(prompt)), *[0.0] * (self.size - 2)] for prompt in prompts]
        return [[value / hypot(*vector) for value in vector] for vector in vectors]


@dataclass
class FakeReranker(FakeWorker):
    """A pair's score is the share of the document's bytes that the query has too."""

    async def encode_pair(self, first: str, second: str) -> TokenizedText:
        return TokenizedText(tuple((first + second).encode()), len(first.encode()))

    async def score(self, pairs: Sequence[TokenizedText]) -> Sequence[float]:
        found = [(pair.tokens[: pair.second_at], pair.tokens[pair.second_at :]) for pair in pairs]
        return [sum(byte in query for byte in text) / len(text) for query, text in found]


def score(token: int, likeliest: int) -> TokenLogprob:
    """A byte's logprob is -byte/8; the bytes after it are the next likely ones."""
    tops = ((token + place) % 256 for place in range(likeliest))
    return TokenLogprob(token, -token / 8, tuple((top, -top / 8) for top in tops))


def _logprobs(text: str, likeliest: int | None) -> tuple[TokenLogprob, ...]:
    return () if likeliest is None else tuple(score(byte, likeliest) for byte in text.encode())


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    found = [(text.index(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    place, stop = min(found)
    return text[:place], stop


@dataclass(frozen=True)
class FakeEntry:
    name: str
    aliases: tuple[str, ...] = ()
    created: int = 1_700_000_000
    state: str = "loaded"
    adapters: tuple[str, ...] = ()
    kind: Kind | None = "chat"
    nbytes: int = 3_000

    def seconds_left(self, now: float) -> float:
        return 60.0


def fake_card(**changes: Any) -> ModelCard:
    defaults: dict[str, Any] = {
        "kind": "chat",
        "format": "gguf",
        "architecture": "fake",
        "nbytes": 2_000,
        "digest": "ab" * 32,
        "modified": 1_700_000_000.0,
        "parameters": 134_515_008,
        "quantization": "Q4_1",
        "max_context": 1000,
        "template": "{{ messages }}",
    }
    return ModelCard(**defaults | changes)


@dataclass
class FakeRegistry:
    """Serves ``worker`` under its name, under ``aliases`` and under the names of ``adapters``."""

    worker: FakeWorker = field(default_factory=FakeWorker)
    aliases: tuple[str, ...] = ("fake",)
    adapters: tuple[str, ...] = ()
    ready: bool = True
    refusal: EmlxdError | None = None
    leased: int = 0
    card: ModelCard | None = field(default_factory=fake_card)

    async def cards(self) -> Mapping[str, ModelCard]:
        return {self.worker.name: self.card} if self.card else {}

    @property
    def models(self) -> Sequence[FakeEntry]:
        state = "loaded" if self.ready else "loading"
        kind = self.card.kind if self.card else None
        return (FakeEntry(self.worker.name, self.aliases, state=state, adapters=self.adapters, kind=kind),)

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[FakeWorker]:
        if name not in (self.worker.name, *self.aliases, *self.adapters):
            raise ModelNotFound(name)
        if self.refusal is not None:
            raise self.refusal
        self.leased += 1
        try:
            yield self.worker
        finally:
            self.leased -= 1
