"""One answer while the engine works on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Protocol

from emlxd.core import (
    Finished,
    FinishReason,
    GenerateRequest,
    PromptScored,
    SamplingParams,
    TextPiece,
    Timing,
    TokenLogprob,
    Usage,
)
from emlxd.graph.batch import Begin
from emlxd.text.detokenizer import Detokenizer
from emlxd.text.output import OutputText
from emlxd.worker.mailbox import Generation
from emlxd.worker.speculation import PromptLookup


class Matcher(Protocol):
    """A grammar's state along one answer."""

    @property
    def finished(self) -> bool:
        """Whether nothing may follow."""

    def mask(self) -> bytes:
        """The tokens that may come, as ``graph.batch.Begin.allowed``."""

    def accept(self, token: int) -> None: ...


@dataclass(slots=True)
class Clock:
    """When a sequence passed its stations, in seconds of a monotonic clock; 0 is 'not yet'."""

    arrived: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's answers with its place in the engine.

    ``order`` is its number in the order of admission. ``context`` is what is prefilled: the prompt, and the
    answer so far if it starts again. ``prefilled`` counts tokens of it whose K/V is written, ``dispatched``
    sampled tokens that the device has or will have; ``answer`` holds those that the host has read. The last
    two differ by the step in flight.
    """

    request: GenerateRequest
    generation: Generation
    output: OutputText
    eos_ids: Set[int]
    sampling: SamplingParams
    index: int = 0
    leader: Sequence | None = None
    logprobs: LogprobQueue | None = None
    matcher: Matcher | None = None
    lookup: PromptLookup | None = None
    clock: Clock = field(default_factory=Clock)
    slot: int = -1
    order: int = -1
    context: tuple[int, ...] = ()
    prefilled: int = 0
    cached: int = 0
    dispatched: int = 0
    answer: list[int] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        self.context = self.request.prompt

    @property
    def running(self) -> bool:
        return self.slot >= 0

    @property
    def prompt_left(self) -> int:
        return len(self.context) - self.prefilled

    @property
    def decoding(self) -> bool:
        return self.prompt_left == 0 and self.dispatched < self.request.max_tokens

    @property
    def written(self) -> int:
        """How many tokens have, or will have when the device is done, their K/V: the next position."""
        return self.prefilled if self.prompt_left else len(self.request.prompt) + max(self.dispatched - 1, 0)

    def can_draft(self, width: int) -> bool:
        """Whether a step may check ``width`` drafted tokens: it decodes, and they would fit."""
        end = len(self.request.prompt) + self.request.max_tokens
        return self.lookup is not None and self.decoding and self.written + width < end

    def draft(self) -> list[int]:
        return self.lookup.propose([*self.request.prompt, *self.answer]) if self.lookup else []

    @property
    def scores_prompt(self) -> bool:
        return self.request.prompt_logprobs is not None and self.leader is None

    @property
    def waits_for_leader(self) -> bool:
        """The prompt is being prefilled for another answer to it, and can be copied when that is done."""
        return self.leader is not None and self.leader.running and self.leader.prompt_left > 0

    def begin(self) -> Begin:
        allowed = self.matcher.mask() if self.matcher else None
        return Begin(self.sampling, self.request.prompt, tuple(self.answer), allowed)

    def accept(
        self, token: int, logprob: TokenLogprob | None
    ) -> tuple[TextPiece | None, FinishReason | None]:
        """Takes a sampled token: the text it releases, and the reason if the answer ends with it."""
        self.answer.append(token)
        text, reason = self._text_after(token)
        found: tuple[TokenLogprob, ...] = ()
        if self.logprobs is not None:
            if logprob is not None and not (reason == "stop" and token in self.eos_ids):
                self.logprobs.push(logprob)
            found = self.logprobs.release(len(text), last=reason == "length")
        piece = TextPiece(text, self.index, found) if text or found else None
        return piece, reason

    def _text_after(self, token: int) -> tuple[str, FinishReason | None]:
        if token in self.eos_ids:
            return self.output.finish(), "stop"
        text = self.output.push(token)
        if self.output.stopped is not None:
            return text, "stop"
        if self.matcher is not None:
            self.matcher.accept(token)
            if self.matcher.finished:
                return text + self.output.finish(), "stop"
        if len(self.answer) == self.request.max_tokens:
            return text + self.output.finish(), "length"
        return text, None

    def scored(self) -> PromptScored:
        """The prompt's log-probabilities, with as many of the likeliest as were asked for."""
        count = self.request.prompt_logprobs or 0
        return PromptScored((None, *(TokenLogprob(s.token, s.logprob, s.top[:count]) for s in self.scores)))

    def restart(self) -> None:
        """Forgets the device's state: prompt and answer so far are to be prefilled again."""
        self.context = (*self.request.prompt, *self.answer)
        self.prefilled, self.dispatched, self.slot = 0, len(self.answer), -1
        self.scores.clear()

    def finished(self, reason: FinishReason, now: float) -> Finished:
        clock = self.clock
        return Finished(
            reason,
            Usage(len(self.request.prompt), len(self.answer), self.cached),
            Timing(
                queue=clock.admitted - clock.arrived,
                prefill=clock.first_token - clock.admitted,
                decode=now - clock.first_token,
            ),
            stop_sequence=self.output.stopped,
            index=self.index,
        )


class LogprobQueue:
    """Holds log-probabilities back until the text of their tokens is released."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._end = 0
        self._released = 0
        self._queue: deque[tuple[int, TokenLogprob]] = deque()

    def push(self, logprob: TokenLogprob) -> None:
        self._end += len(self._detokenizer.push(logprob.token))
        self._queue.append((self._end, logprob))

    def release(self, characters: int, *, last: bool) -> tuple[TokenLogprob, ...]:
        """Those whose text is complete after so many more characters; all of them at the ``last``."""
        self._released += characters
        released = []
        while self._queue and (last or self._queue[0][0] <= self._released):
            released.append(self._queue.popleft()[1])
        return tuple(released)
