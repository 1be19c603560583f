"""A model whose steps cost the device a given time and the host next to nothing; its text is real."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from emlxd.config_file import load
from emlxd.core import ModelInfo, SamplingParams
from emlxd.graph.batch import PrefillRow, StepOutput
from emlxd.sources import fetch
from emlxd.worker.gate import Gate
from emlxd.worker.load import Model, read_tokenizer
from emlxd.worker.worker import Worker, WorkerOptions

CONFIG = Path(__file__).parents[1] / "config" / "config.yaml"
TEXT = "The quick brown fox jumps over the lazy dog, and 12 others look on. Příliš žluťoučký kůň. 你好\n"


@dataclass(frozen=True, slots=True)
class Step:
    output: StepOutput
    end: float

    def read(self) -> StepOutput:
        if (left := self.end - time.perf_counter()) > 0:
            time.sleep(left)
        return self.output


class Instant:
    """A runner. Each step takes the device ``seconds``, one after the other."""

    blocks = block_bytes = checkpoints = checkpoint_bytes = 0
    weight_bytes = cache_bytes = prefix_cache_bytes = traces = 0
    recurrent, ring, slack = False, None, 8192

    def __init__(self, tokens: Sequence[int], seconds: float) -> None:
        self._tokens = tokens
        self._seconds = seconds
        self._step = 0
        self._busy_until = 0.0

    def prefill(self, rows: Sequence[PrefillRow]) -> Step:
        return self._begin([self._tokens[0] for row in rows if row.begin])

    def decode(self, positions: Sequence[int | None]) -> Step:
        self._step += 1
        return self._begin([self._tokens[self._step % len(self._tokens)]] * len(positions))

    def _begin(self, tokens: list[int]) -> Step:
        self._busy_until = max(self._busy_until, time.perf_counter()) + self._seconds
        return Step(StepOutput(tokens), self._busy_until)

    def move(self, source: int, target: int, tokens: int) -> None: ...
    def release(self, slot: int) -> None: ...
    def close(self) -> None: ...


def instant_worker(name: str, slots: int, seconds: float = 0.0) -> Worker:
    tokenizer = read_tokenizer(fetch(load(CONFIG).models[0].source))
    runner = Instant(tokenizer.encode(TEXT), seconds)
    info = ModelInfo(name, 8192, slots, tokenizer.vocab_size, SamplingParams())
    options = WorkerOptions(name, max_queue=2 * slots, prefill_chunk=512, prefill_slice=0.25)
    return Worker(options, lambda: Model(info, runner, tokenizer, None), Gate())  # type: ignore[arg-type]
