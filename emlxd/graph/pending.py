"""Steps that still run on the device, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast

import mlx.core as mx

from emlxd.core import TokenLogprob
from emlxd.graph.batch import StepOutput
from emlxd.graph.sampling import MAX_LOGPROBS, Logprobs


class Pending:
    """A dispatched step, still running on the device."""

    def __init__(
        self,
        tokens: Sequence[mx.array],
        wanted: Sequence[int | None],
        logprobs: Logprobs | None = None,
        scores: Sequence[Sequence[Scored]] = (),
        barrier: mx.array | None = None,
    ) -> None:
        """``tokens`` int32 arrays, together at least one for each row.

        ``wanted`` has an entry for each row: how many likely tokens it asks for, None for no logprobs.
        """
        self._tokens = tokens
        self._wanted = wanted
        self._logprobs = logprobs
        self._scores = scores
        self._barrier = barrier

    def read(self) -> StepOutput:
        """Waits for the step."""
        if self._barrier is not None:
            mx.eval(self._barrier)
        parts = (cast("list[int]", part.tolist()) for part in self._tokens)
        tokens = list(chain.from_iterable(parts))[: len(self._wanted)]
        logprobs = self._logprobs.rows(tokens, self._wanted) if self._logprobs else None
        scores = [[one for part in row for one in part.read()] for row in self._scores]
        return StepOutput(tokens, logprobs, scores)


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of some of a prompt's tokens."""

    tokens: tuple[int, ...]
    logprobs: Logprobs

    def read(self) -> list[TokenLogprob]:
        rows = self.logprobs.rows(self.tokens, [MAX_LOGPROBS] * len(self.tokens))
        return [row for row in rows if row is not None]
