"""How many tokens a second a worker can handle when the device costs nothing.

    python benchmarks/host_overhead.py

Scheduler, detokenizer, stop strings, words and mailbox are real; the runner answers at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from emlxd.config_file import load
from emlxd.core import Finished, GenerateRequest, ModelInfo, SamplingParams
from emlxd.graph.batch import PrefillRow, StepOutput
from emlxd.sources import fetch
from emlxd.worker.gate import Gate
from emlxd.worker.load import Model, read_tokenizer
from emlxd.worker.mailbox import Generation
from emlxd.worker.worker import Worker, WorkerOptions

STREAMS, TOKENS = 32, 1000
TEXT = "The quick brown fox jumps over the lazy dog, and 12 others look on. Příliš žluťoučký kůň. 你好\n"


@dataclass(frozen=True, slots=True)
class Done:
    output: StepOutput

    def read(self) -> StepOutput:
        return self.output


class Instant:
    """A runner whose steps are over when they begin."""

    blocks = block_bytes = checkpoints = checkpoint_bytes = 0
    weight_bytes = cache_bytes = prefix_cache_bytes = traces = 0
    recurrent, ring, slack = False, None, 8192

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._step = 0

    def prefill(self, rows: Sequence[PrefillRow]) -> Done:
        return Done(StepOutput([self._tokens[0] for row in rows if row.begin]))

    def decode(self, positions: Sequence[int | None]) -> Done:
        self._step += 1
        return Done(StepOutput([self._tokens[self._step % len(self._tokens)]] * len(positions)))

    def move(self, source: int, target: int, tokens: int) -> None: ...
    def release(self, slot: int) -> None: ...
    def close(self) -> None: ...


async def main() -> None:
    tokenizer = read_tokenizer(fetch(load(Path("config/config.yaml")).models[0].source))
    runner = Instant(tokenizer.encode(TEXT))
    info = ModelInfo("instant", 8192, STREAMS, tokenizer.vocab_size, SamplingParams())
    options = WorkerOptions("instant", max_queue=64, prefill_chunk=512, prefill_slice=0.25)
    worker = Worker(options, lambda: Model(info, runner, tokenizer, None), Gate())  # type: ignore[arg-type]
    await worker.start()

    async def read(generation: Generation) -> int:
        async for event in generation:
            if isinstance(event, Finished):
                return event.usage.completion_tokens
        return 0

    for round in range(4):
        started = time.perf_counter()
        requests = [
            GenerateRequest(f"{round}-{n}", (1, 2, 3), TOKENS, stop=("never said", "nor this"))
            for n in range(STREAMS)
        ]
        counts = await asyncio.gather(*(read(worker.submit(request)) for request in requests))
        print(f"{sum(counts) / (time.perf_counter() - started):,.0f} tokens/s")
    await worker.close()


asyncio.run(main())
