"""An engine on a fake runner, driven step by step in the test's own thread."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Protocol

from emlxd.core import Event, Failed, Finished, GenerateRequest, SamplingParams, TextPiece, TokenLogprob
from emlxd.worker.disk_cache import DiskCache
from emlxd.worker.engine import Engine
from emlxd.worker.pacer import PrefillPacer
from emlxd.worker.runner import Runner
from emlxd.worker.scheduler import Scheduler
from emlxd.worker.sequence import Adapter, Clock, Sequence
from emlxd.worker.speculation import PromptLookup
from tests.worker.fakes import FakeRunner, Rule


class Matcher(Protocol):
    """Stands for a grammar's state along one answer."""

    @property
    def finished(self) -> bool: ...
    def mask(self) -> bytes: ...
    def accept(self, token: int) -> None: ...


@dataclass(eq=False)
class Listener:
    """Stands for a ``Generation``: keeps what the engine says."""

    request: GenerateRequest
    events: list[Event] = field(default_factory=list)
    ends: int = 0

    @property
    def text(self) -> str:
        return self.text_of(0)

    def text_of(self, index: int) -> str:
        pieces = (event for event in self.events if isinstance(event, TextPiece))
        return "".join(piece.text for piece in pieces if piece.index == index)

    @property
    def tokens(self) -> list[int]:
        return self.tokens_of(0)

    def tokens_of(self, index: int) -> list[int]:
        """Of the texts that ``Output`` writes."""
        return [int(word) for word in self.text_of(index).split()]

    @property
    def end(self) -> Finished | Failed | None:
        last = self.events[-1] if self.events else None
        return last if isinstance(last, Finished | Failed) else None


class Post:
    """Stands for the mailbox: delivers at once, in the test's thread."""

    def put(self, listener: Listener, event: Event) -> None:
        assert listener.ends < listener.request.n, "nothing follows the last event"
        listener.ends += isinstance(event, Finished | Failed)
        listener.events.append(event)

    def flush(self) -> None:
        pass


class Output:
    """Writes a token as its number and a space; a stop 'string' is one of these numbers."""

    called = False
    reasoning_tokens = 0

    def __init__(self, stop: tuple[str, ...], index: int, matcher: Matcher | None) -> None:
        self._stop = stop
        self._index = index
        self._matcher = matcher
        self.stopped: str | None = None

    @property
    def guarded(self) -> bool:
        return self._matcher is not None

    @property
    def complete(self) -> bool:
        return self._matcher is not None and self._matcher.finished

    def mask(self) -> bytes | None:
        return self._matcher.mask() if self._matcher else None

    def push(self, token: int, logprob: TokenLogprob | None) -> list[TextPiece]:
        if self._matcher:
            self._matcher.accept(token)
        if str(token) in self._stop:
            self.stopped = str(token)
            return []
        return [TextPiece(f"{token} ", self._index, (logprob,) if logprob else ())]

    def finish(self, *, cut: bool = False) -> list[TextPiece]:
        return []


class Drive:
    """An engine on any runner; ``eos`` are the ids that end an answer. Time is counted in steps."""

    def __init__(
        self,
        runner: Runner,
        *,
        slots: int,
        chunk: int = 64,
        eos: Set[int] = frozenset(),
        max_draft: int = 0,
        timeout: float = math.inf,
        disk: DiskCache | None = None,
    ) -> None:
        self.max_draft = max_draft
        self.slots = slots
        self.scheduler = Scheduler(slots=slots, prefill_chunk=chunk)
        self.now = 0.0
        self.engine = Engine(
            runner,
            self.scheduler,
            PrefillPacer(1.0),
            Post(),  # type: ignore[arg-type]
            lambda: self.now,
            max_draft,
            disk,
        )
        self._timeout = timeout
        self._eos = eos

    def submit(
        self, request: GenerateRequest, matcher: Matcher | None = None, adapter: Adapter | None = None
    ) -> Listener:
        listener = Listener(request)
        answers = [
            Sequence(
                request,
                listener,  # type: ignore[arg-type]
                Output(request.stop, index, matcher),  # type: ignore[arg-type]
                self._eos,
                _seeded(request, index),
                index,
                adapter or Adapter(),
                clock=Clock(self.now, self.now + self._timeout),
            )
            for index in range(request.n)
        ]
        for answer in answers:
            answer.lookup = PromptLookup(self.max_draft) if self.max_draft else None
            answer.leader = None if answer is answers[0] else answers[0]
        self.engine.add(answers)
        return listener

    def step(self) -> None:
        self.now += 1.0
        self.engine.step()
        self.check()

    def run(self, limit: int = 10_000) -> None:
        while not self.engine.idle:
            self.step()
            limit -= 1
            assert limit, "the engine does not come to an end"

    def check(self) -> None:
        """Slots are a dense prefix, each its own sequence's."""
        running = self.scheduler.running
        assert [sequence.slot for sequence in running] == list(range(len(running)))
        assert len(running) <= self.slots
        assert not any(sequence.ended for sequence in running)


def _seeded(request: GenerateRequest, index: int) -> SamplingParams:
    seed = request.sampling.seed
    return replace(request.sampling, seed=None if seed is None else seed + index)


class Harness(Drive):
    """The same on a fake runner: ``rule`` gives the next token."""

    def __init__(
        self,
        rule: Rule,
        *,
        slots: int = 4,
        chunk: int = 64,
        eos: Set[int] = frozenset({0}),
        blocks: int = 0,
        max_draft: int = 0,
        timeout: float = math.inf,
        recurrent: bool = False,
        checkpoints: int = 0,
    ) -> None:
        self.runner = FakeRunner(slots, rule, blocks=blocks, recurrent=recurrent, checkpoints=checkpoints)
        super().__init__(self.runner, slots=slots, chunk=chunk, eos=eos, max_draft=max_draft, timeout=timeout)
