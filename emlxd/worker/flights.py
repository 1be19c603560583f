"""Steps on their way through the device: dispatched, read, and handed over to be looked at."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Final

from emlxd.graph.batch import StepOutput
from emlxd.worker.pacer import PrefillPacer
from emlxd.worker.runner import Pending
from emlxd.worker.scheduler import Chunk
from emlxd.worker.sequence import Sequence

AHEAD: Final = 2  # rounds on the device: one that it computes, one to go on with
WAITED: Final = 1e-3  # seconds: a read that took longer had to wait for the device


@dataclass(frozen=True, slots=True)
class Flight:
    """A dispatched step and the sequences that its tokens belong to. ``chunks`` is what it prefills.

    ``since`` is the time at which its dispatch began.
    """

    pending: Pending
    rows: Rows[Sequence | None]
    since: float
    chunks: Rows[Chunk] = ()


@dataclass(frozen=True, slots=True)
class Landed:
    """A step that was read, at the time ``at``."""

    flight: Flight
    output: StepOutput
    at: float


class Flights:
    """All of them, in order. A round is what one step of the engine dispatches: prefill, decode or both."""

    def __init__(self, pacer: PrefillPacer, now: Callable[[], float]) -> None:
        """``pacer`` is told how long the device took for prompts."""
        self._pacer = pacer
        self._now = now
        self._launched: list[Flight] = []
        self._rounds: deque[list[Flight]] = deque()
        self._landed: deque[Landed] = deque()
        self._busy_until = 0.0  # when the device was last known to compute a step

    def __bool__(self) -> bool:
        return bool(self._launched or self._rounds or self._landed)

    def launch(self, flight: Flight) -> None:
        """Adds to the round that is being dispatched."""
        self._launched.append(flight)

    def land(self) -> None:
        """Ends the round, and waits for the oldest one if there is no more to dispatch behind it."""
        more = self._end_round()
        if len(self._rounds) >= AHEAD or (self._rounds and not more):
            for flight in self._rounds.popleft():
                self._landed.append(self._read(flight))

    def landed(self) -> Iterator[Landed]:
        """Takes what was read."""
        while self._landed:
            yield self._landed.popleft()

    def all(self) -> Iterator[Landed]:
        """Takes everything, and waits for it."""
        yield from self.landed()
        self._end_round()
        while self._rounds:
            for flight in self._rounds.popleft():
                yield self._read(flight)

    def clear(self) -> None:
        """Forgets them: what was on the device is lost."""
        self._launched = []
        self._rounds.clear()
        self._landed.clear()

    def passed(self, now: float) -> None:
        """A step that was never in flight has just been computed."""
        self._busy_until = now

    def _end_round(self) -> bool:
        """Gives whether anything was dispatched in it."""
        launched, self._launched = self._launched, []
        if launched:
            self._rounds.append(launched)
        return bool(launched)

    def _read(self, flight: Flight) -> Landed:
        asked = self._now()
        output = flight.pending.read()
        now = self._now()
        # The device began this step when it was dispatched or, if later, when the step before was over.
        # If reading had to wait, it was over just now. If not, it was over earlier, nobody knows when.
        began = max(self._busy_until, flight.since)
        self._pacer.observe(sum(chunk.count for chunk in flight.chunks), now - began)
        if now - asked > WAITED:
            self._busy_until = now
        return Landed(flight, output, now)
