"""The engine of one model: schedule, run, deliver, one step after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Final, Protocol

from emlxd.core import Failed, TextPiece
from emlxd.errors import EmlxdError
from emlxd.graph.batch import PrefillRow
from emlxd.worker.mailbox import Mailbox
from emlxd.worker.pacer import PrefillPacer
from emlxd.worker.scheduler import Chunk, Scheduler
from emlxd.worker.sequence import Sequence

UNLIMITED: Final = 1 << 30


class Pending(Protocol):
    """A step that runs on the device."""

    def read(self) -> list[int]:
        """Waits for the step; a token for each row that samples."""


class Runner(Protocol):
    """What the engine needs of the device. ``graph.runner.MlxRunner`` is the real one."""

    def prefill(self, rows: Rows[PrefillRow]) -> Pending: ...
    def decode(self, positions: Rows[int | None]) -> Pending: ...
    def move(self, source: int, target: int, tokens: int) -> None: ...
    def release(self, slot: int) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Flight:
    """A dispatched step, the sequences that its tokens belong to, and how many prompt tokens it prefills."""

    pending: Pending
    rows: Rows[Sequence | None]
    prefill_tokens: int = 0


class Engine:
    """Runs sequences through a runner. Lives on one thread; tests drive it without any."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        pacer: PrefillPacer,
        mailbox: Mailbox,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._pacer = pacer
        self._mailbox = mailbox
        self._now = now
        self._sequences: dict[str, Sequence] = {}
        self._flights: list[Flight] = []
        self._free_since = 0.0

    @property
    def idle(self) -> bool:
        return self._scheduler.idle and not self._flights

    @property
    def size(self) -> int:
        """Sequences that wait or run."""
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self._sequences[sequence.request.id] = sequence
        self._scheduler.add(sequence)

    def cancel(self, request_id: str) -> None:
        """Ends a sequence without a word; unknown ids have ended already."""
        if sequence := self._sequences.get(request_id):
            self._remove(sequence)

    def step(self) -> None:
        """At most one slice of prefill and one decode step.

        Both are dispatched before the tokens of the step before are read, so that the device computes
        while the host detokenizes.
        """
        for sequence in self._scheduler.admit():
            sequence.clock.admitted = self._now()
        dispatched = [self._dispatch_prefill(), self._dispatch_decode()]
        for flight in self._flights:
            self._receive(flight)
        self._flights = [flight for flight in dispatched if flight]
        self._mailbox.flush()

    def fail_all(self, error: EmlxdError) -> None:
        """Ends every sequence with ``error`` and forgets what is in flight."""
        self._flights = []
        for sequence in list(self._sequences.values()):
            self._mailbox.put(sequence.generation, Failed(error))
            self._remove(sequence)
        self._mailbox.flush()

    def _dispatch_prefill(self) -> Flight | None:
        chunks = self._scheduler.prefill(self._pacer.tokens if self._scheduler.decoding else UNLIMITED)
        if not chunks:
            return None
        if not self._flights:
            self._free_since = self._now()
        pending = self._runner.prefill([_prefill_row(chunk) for chunk in chunks])
        return Flight(pending, [c.sequence for c in chunks if c.last], sum(c.count for c in chunks))

    def _dispatch_decode(self) -> Flight | None:
        rows = self._scheduler.decode()
        if not rows:
            return None
        pending = self._runner.decode([row.position if row else None for row in rows])
        return Flight(pending, [row.sequence if row else None for row in rows])

    def _receive(self, flight: Flight) -> None:
        tokens = flight.pending.read()
        now = self._now()
        self._pacer.observe(flight.prefill_tokens, now - self._free_since)
        self._free_since = now
        for token, sequence in zip(tokens, flight.rows, strict=True):
            if sequence and not sequence.ended:
                self._accept(sequence, token, now)

    def _accept(self, sequence: Sequence, token: int, now: float) -> None:
        if sequence.received == 0:
            sequence.clock.first_token = now
        text, reason = sequence.accept(token)
        if text:
            self._mailbox.put(sequence.generation, TextPiece(text))
        if reason:
            self._mailbox.put(sequence.generation, sequence.finished(reason, now))
            self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        """Frees the slot at once; what the step in flight still brings for it is dropped on arrival."""
        del self._sequences[sequence.request.id]
        slot = sequence.slot
        move = self._scheduler.remove(sequence)
        if move:
            self._runner.move(move.source, move.target, move.tokens)
        elif slot >= 0:
            self._runner.release(slot)


def _prefill_row(chunk: Chunk) -> PrefillRow:
    sequence, end = chunk.sequence, chunk.start + chunk.count
    return PrefillRow(
        slot=sequence.slot,
        start=chunk.start,
        tokens=sequence.request.prompt[chunk.start : end],
        sampling=sequence.request.sampling if chunk.last else None,
    )
