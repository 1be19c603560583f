"""How many tokens a second a worker can handle when the device costs nothing.

    python benchmarks/host_overhead.py

Scheduler, detokenizer, stop strings, words and mailbox are real; the runner answers at once.
"""

from __future__ import annotations

import asyncio
import time

from instant import instant_worker

from emlxd.core import Finished, GenerateRequest
from emlxd.worker.mailbox import Generation

STREAMS, TOKENS = 32, 1000


async def main() -> None:
    worker = instant_worker("instant", STREAMS)
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
