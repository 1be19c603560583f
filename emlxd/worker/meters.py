"""What an engine counts while it works, cheap enough for every token."""

from __future__ import annotations

from typing import Final

from emlxd.core import WorkerCounts
from emlxd.instruments import Histogram

# Seconds, as other servers have them, so that their dashboards fit.
INTER_TOKEN_BOUNDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
STEP_BOUNDS: Final = (*INTER_TOKEN_BOUNDS, 5.0, 10.0)
BATCH_BOUNDS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class Meters:
    """The histograms of one engine, and how often its runner has traced a step."""

    def __init__(self) -> None:
        self.step_seconds = Histogram(STEP_BOUNDS)
        self.step_batch_size = Histogram(BATCH_BOUNDS)
        self.inter_token_seconds = Histogram(INTER_TOKEN_BOUNDS)
        self.traces = 0

    def counts(self, *, prefix_query_tokens: int = 0, prefix_hit_tokens: int = 0) -> WorkerCounts:
        """What was counted so far, with what the prefix cache counts."""
        return WorkerCounts(
            prefix_query_tokens=prefix_query_tokens,
            prefix_hit_tokens=prefix_hit_tokens,
            traces=self.traces,
            step_seconds=self.step_seconds.read(),
            step_batch_size=self.step_batch_size.read(),
            inter_token_seconds=self.inter_token_seconds.read(),
        )
