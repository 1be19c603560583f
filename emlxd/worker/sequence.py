"""One request while the engine works on it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from emlxd.core import Finished, FinishReason, GenerateRequest, Timing, Usage
from emlxd.text.output import OutputText
from emlxd.worker.mailbox import Generation


@dataclass(slots=True)
class Clock:
    """When a sequence passed its stations, in seconds of a monotonic clock; 0 is 'not yet'."""

    arrived: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """A request with its place in the engine.

    ``order`` is its number in the order of admission. ``prefilled`` counts prompt tokens whose K/V is
    written, ``dispatched`` sampled tokens that the device has or will have, ``received`` those that the
    host has read: the last two differ by the step in flight.
    """

    request: GenerateRequest
    generation: Generation
    output: OutputText
    eos_ids: Set[int]
    clock: Clock = field(default_factory=Clock)
    slot: int = -1
    order: int = -1
    prefilled: int = 0
    dispatched: int = 0
    received: int = 0
    ended: bool = False

    @property
    def prompt_left(self) -> int:
        return len(self.request.prompt) - self.prefilled

    @property
    def decoding(self) -> bool:
        return 0 < self.dispatched < self.request.max_tokens

    @property
    def next_position(self) -> int:
        """Where the next K/V is written."""
        return self.prefilled + max(self.dispatched - 1, 0)

    def accept(self, token: int) -> tuple[str, FinishReason | None]:
        """Takes a sampled token: the text it releases, and the reason if the sequence ends with it."""
        self.received += 1
        if token in self.eos_ids:
            return self.output.finish(), "stop"
        text = self.output.push(token)
        if self.output.stopped is not None:
            return text, "stop"
        if self.received == self.request.max_tokens:
            return text + self.output.finish(), "length"
        return text, None

    def finished(self, reason: FinishReason, now: float) -> Finished:
        clock = self.clock
        return Finished(
            reason,
            Usage(prompt_tokens=len(self.request.prompt), completion_tokens=self.received),
            Timing(
                queue=clock.admitted - clock.arrived,
                prefill=clock.first_token - clock.admitted,
                decode=now - clock.first_token,
            ),
            stop_sequence=self.output.stopped,
        )
