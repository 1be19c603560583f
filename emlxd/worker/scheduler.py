"""Who runs next: first come, first served, but n answers to a prompt hold up nobody. On integers alone.

Running sequences fill slots 0..n-1 without a gap. When one in the middle ends, the last one moves down.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from emlxd.worker.sequence import Sequence

MAX_PADDED: Final = 1.5  # times the real tokens of prompts that are prefilled side by side


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens ``start .. start + count`` of a sequence, to be prefilled in this step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def last(self) -> bool:
        return self.start + self.count == len(self.sequence.context)


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A decoding sequence and the position of its pending token."""

    sequence: Sequence
    position: int


@dataclass(frozen=True, slots=True)
class Move:
    """The sequence in slot ``source``, ``tokens`` positions long, goes to slot ``target``."""

    source: int
    target: int
    tokens: int


class Scheduler:
    """Holds every sequence of one model from arrival to end."""

    def __init__(self, *, slots: int, prefill_chunk: int) -> None:
        self._slots = slots
        self._prefill_chunk = prefill_chunk
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._admitted = 0

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def decoding(self) -> bool:
        return any(sequence.decoding for sequence in self.running)

    @property
    def prefilling(self) -> bool:
        return any(sequence.prompt_left for sequence in self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Gives free slots to requests that have the fewest, and among these to those who wait longest."""
        admitted = []
        while self.waiting and len(self.running) < self._slots:
            held = Counter(sequence.request.id for sequence in self.running)
            sequence = min(self.waiting, key=lambda sequence: held[sequence.request.id])
            self.waiting.remove(sequence)
            sequence.slot, sequence.order = len(self.running), self._admitted
            self._admitted += 1
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def prefill(self, budget: int) -> list[Chunk]:
        """Chunks for the oldest unfinished prompts, at most ``budget`` tokens in all, padding counted."""
        budget = min(budget, self._prefill_chunk)
        chunks: list[Chunk] = []
        real = width = 0
        for sequence in self._unfilled():
            count = min(sequence.piece_left, budget)
            padded = (len(chunks) + 1) * max(width, count)
            if chunks and (padded > budget or padded > MAX_PADDED * (real + count)):
                break
            chunks.append(Chunk(sequence, sequence.prefilled, count))
            real, width = real + count, max(width, count)
        for chunk in chunks:
            chunk.sequence.prefilled += chunk.count
            if chunk.last and chunk.sequence.request.max_tokens:
                chunk.sequence.dispatched += 1
        return chunks

    def _unfilled(self) -> list[Sequence]:
        """Admitted sequences whose prompt is not complete, in order of arrival."""
        unfilled = (s for s in self.running if s.prompt_left and not s.waits_for_leader)
        return sorted(unfilled, key=lambda sequence: sequence.order)

    def decode(self) -> list[DecodeRow | None]:
        """Slots 0..n-1 that cover everyone who decodes; None for one among them that does not."""
        rows = [DecodeRow(s, s.written) if s.decoding else None for s in self.running]
        while rows and rows[-1] is None:
            rows.pop()
        for row in rows:
            if row:
                row.sequence.dispatched += 1
        return rows

    def requeue(self) -> None:
        """Sends everyone who runs back to the head of the queue, to start again."""
        for sequence in sorted(self.running, key=lambda sequence: -sequence.order):
            sequence.restart()
            self.waiting.appendleft(sequence)
        self.running.clear()

    def clear(self) -> None:
        """Forgets everyone: nothing runs any more."""
        self.waiting.clear()
        self.running.clear()

    def remove(self, sequence: Sequence) -> Move | None:
        """Takes a sequence out, wherever it is. Gives the move that closes the gap, if there is one."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return None
        target, last = sequence.slot, self.running.pop()
        sequence.slot = -1
        if last is sequence:
            return None
        move = Move(last.slot, target, last.written)
        last.slot = target
        self.running[target] = last
        return move
