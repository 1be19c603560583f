"""What an engine counts while it works, cheap enough for every token.

One thread writes, any thread may read at any time: a reading may be a step behind, and never blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from emlxd.core import Distribution

# Seconds, as other servers have them, so that their dashboards fit.
INTER_TOKEN_BOUNDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
STEP_BOUNDS: Final = (*INTER_TOKEN_BOUNDS, 5.0, 10.0)
BATCH_BOUNDS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class Histogram:
    """Counts values by the first of ``bounds`` that they do not exceed."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._total)


class Meters:
    """The histograms of one engine, and how often its runner has traced a step."""

    def __init__(self) -> None:
        self.step_seconds = Histogram(STEP_BOUNDS)
        self.step_batch_size = Histogram(BATCH_BOUNDS)
        self.inter_token_seconds = Histogram(INTER_TOKEN_BOUNDS)
        self.traces = 0
