"""One answer while the engine works on it."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field

from emlxd.core import (
    Finished,
    FinishReason,
    GenerateRequest,
    PromptScored,
    SamplingParams,
    Timing,
    TokenLogprob,
    Usage,
)
from emlxd.graph.batch import Begin
from emlxd.text.answer import Answer, Piece
from emlxd.worker.mailbox import Generation
from emlxd.worker.prefix_cache import BlockKeys
from emlxd.worker.speculation import PromptLookup


@dataclass(slots=True)
class Clock:
    """When a sequence passed its stations, in seconds of a monotonic clock; 0 is 'not yet'.

    Its request fails if it has not ended at ``deadline``.
    """

    arrived: float = 0.0
    deadline: float = math.inf
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of a loaded model: its number there, 0 for none, and what tells its K/V from others'."""

    number: int = 0
    seed: bytes = b""


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's answers with its place in the engine.

    ``order`` is its number in the order of admission. ``context`` is what is prefilled: the prompt, and the
    answer so far if it starts again. ``prefilled`` counts tokens of it whose K/V is written, ``dispatched``
    sampled tokens that the device has or will have; ``answer`` holds those that the host has read. The last
    two differ by the step in flight.

    Of models with a recurrent state: prefill pauses after each of ``stops`` tokens, because the state there
    is to be kept. ``checkpoint`` is where the prefix cache keeps the state after ``state_at`` tokens.

    ``leader`` is the first answer to the same prompt, of which this one copies what it can; ``joined`` says
    that it has. ``keys`` are those of the prompt's and the answer's blocks.
    """

    request: GenerateRequest
    generation: Generation
    output: Answer
    eos_ids: Set[int]
    sampling: SamplingParams
    index: int = 0
    adapter: Adapter = Adapter()
    leader: Sequence | None = None
    lookup: PromptLookup | None = None
    clock: Clock = field(default_factory=Clock)
    slot: int = -1
    order: int = -1
    context: tuple[int, ...] = ()
    prefilled: int = 0
    cached: int = 0
    stops: set[int] = field(default_factory=set)
    keys: BlockKeys = field(init=False)
    joined: bool = False
    checkpoint: int | None = None
    state_at: int = 0
    dispatched: int = 0
    answer: list[int] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        self.context = self.request.prompt
        self.keys = BlockKeys(self.adapter.seed)

    @property
    def running(self) -> bool:
        return self.slot >= 0

    @property
    def prompt_left(self) -> int:
        return len(self.context) - self.prefilled

    @property
    def piece_left(self) -> int:
        """How many tokens there are up to the next stop, or up to the end."""
        ends = (stop for stop in self.stops if stop > self.prefilled)
        return min(ends, default=len(self.context)) - self.prefilled

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
        """Whether the prompt's log-probabilities are still to be told.

        An answer that starts again has told them.
        """
        return self.request.prompt_logprobs is not None and self.leader is None and not self._restarted

    @property
    def _restarted(self) -> bool:
        """Whether a part of the answer is prefilled with the prompt."""
        return len(self.context) > len(self.request.prompt)

    @property
    def waits_for_leader(self) -> bool:
        """Whether the leader is still prefilling the prompt, which can be copied when it is done."""
        leader = self.leader
        return leader is not None and leader.running and leader.prefilled < leader.shared_tokens

    @property
    def shared_tokens(self) -> int:
        """How many tokens of the prompt other answers to it copy: all but the last."""
        return len(self.request.prompt) - 1

    def begin(self) -> Begin:
        return Begin(self.sampling, self.request.prompt, tuple(self.answer), self.output.mask())

    def accept(self, token: int, logprob: TokenLogprob | None) -> tuple[list[Piece], FinishReason | None]:
        """Takes a sampled token: what it releases, and the reason if the answer ends with it.

        Raises EmlxdError where the answer cannot go on in its grammar.
        """
        self.answer.append(token)
        output = self.output
        if token in self.eos_ids:
            return output.finish(), self._reason
        pieces = output.push(token, logprob)
        if output.stopped is not None or output.complete:
            return pieces + output.finish(), self._reason
        if len(self.answer) == self.request.max_tokens:
            return pieces + output.finish(cut=True), "length"
        return pieces, None

    @property
    def _reason(self) -> FinishReason:
        return "tool_calls" if self.output.called else "stop"

    def scored(self) -> PromptScored:
        """The prompt's log-probabilities, with as many of the likeliest as were asked for."""
        count = self.request.prompt_logprobs or 0
        return PromptScored((None, *(TokenLogprob(s.token, s.logprob, s.top[:count]) for s in self.scores)))

    @property
    def usage(self) -> Usage:
        """What it has taken so far."""
        read = min(self.prefilled, len(self.request.prompt))
        return Usage(read, len(self.answer), self.cached, self.output.reasoning_tokens)

    def restart(self) -> None:
        """Forgets the device's state: prompt and answer so far are to be prefilled again."""
        self.context = (*self.request.prompt, *self.answer)
        self.prefilled, self.dispatched, self.slot = 0, len(self.answer), -1
        self.checkpoint, self.joined = None, False
        self.scores.clear()

    def finished(self, reason: FinishReason, now: float) -> Finished:
        clock = self.clock
        return Finished(
            reason,
            Usage(len(self.request.prompt), len(self.answer), self.cached, self.output.reasoning_tokens),
            Timing(
                queue=clock.admitted - clock.arrived,
                prefill=clock.first_token - clock.admitted,
                decode=now - clock.first_token,
            ),
            stop_sequence=self.output.stopped,
            index=self.index,
        )
