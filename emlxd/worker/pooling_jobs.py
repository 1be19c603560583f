"""The requests of a pooling worker: which texts of them are read together, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from emlxd.core import TextBatch, TokenizedText
from emlxd.worker.packing import Pack

ROUND: Final = 256  # texts that are packed together, and the most that a new request waits for
SHARE: Final = 64  # texts of one request in a round, if others wait


@dataclass(eq=False, slots=True)
class Job:
    """A request: its texts, how many of them are taken, and the vectors that there are."""

    texts: Sequence[TokenizedText]
    future: Future[list[list[float]]]
    taken: int = 0
    vectors: dict[int, list[float]] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.future.done()

    def finish(self) -> None:
        """Delivers the vectors if all are there and somebody still waits for them."""
        if len(self.vectors) == len(self.texts):
            with suppress(InvalidStateError):
                self.future.set_result([self.vectors[place] for place in range(len(self.texts))])

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):  # it is over
            self.future.set_exception(error)


@dataclass(frozen=True, slots=True)
class Lane:
    """A batch, and for each of its texts the request that it comes from and its place there."""

    batch: TextBatch
    members: Sequence[tuple[Job, int]]

    @staticmethod
    def of(step: Pack, texts: Sequence[tuple[Job, int]]) -> Lane:
        """The texts of ``step`` that somebody still waits for."""
        rows = [[texts[index] for index in row if not texts[index][0].over] for row in step.rows]
        laid = tuple(tuple(job.texts[place] for job, place in row) for row in rows)
        return Lane(TextBatch(laid, step.height, step.length), list(chain.from_iterable(rows)))


def next_texts(jobs: Sequence[Job]) -> list[tuple[Job, int]]:
    """The next texts of each request, the oldest first: a round full, or a share where others wait."""
    share = ROUND if len(jobs) == 1 else SHARE
    texts: list[tuple[Job, int]] = []
    for job in jobs:
        count = min(share, len(job.texts) - job.taken, ROUND - len(texts))
        texts += [(job, job.taken + place) for place in range(count)]
        job.taken += count
    return texts
