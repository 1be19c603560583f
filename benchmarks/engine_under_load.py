"""How the engine treats many users of the default model: six figures, each within one run.

python benchmarks/engine_under_load.py [NUMBER ...]
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from emlxd.config import ModelSettings, PrefixCacheSettings, PromptLookupSettings, SpeculativeSettings
from emlxd.config_file import load
from emlxd.core import GenerateRequest, SamplingParams, TextPiece
from emlxd.sources import fetch
from emlxd.worker.gate import Gate
from emlxd.worker.load import load_model
from emlxd.worker.worker import Worker, WorkerOptions

GREEDY = SamplingParams(temperature=0.0)
SLICE = 0.25  # seconds
MODEL = load(Path("config/config.yaml")).models[0]


async def start(gate: Gate | None = None, **changes: object) -> Worker:
    settings: ModelSettings = MODEL.model_copy(
        update={"max_context": 4096, "max_queue": 256, "prefix_cache": PrefixCacheSettings(bytes=0)} | changes
    )
    worker = Worker(
        WorkerOptions.of(settings), lambda: load_model(settings, fetch(settings.source)), gate or Gate()
    )
    await worker.start()
    for rows in (1, settings.slots):  # traces and compiles
        await asyncio.gather(*(run(worker, words(300, n), 4) for n in range(rows)))
    return worker


def words(count: int, seed: int) -> tuple[int, ...]:
    """Tokens that look like nothing seen before."""
    return tuple((i * 7919 + seed * 104729) % 40000 + 100 for i in range(count))


async def run(
    worker: Worker, prompt: Iterable[int], tokens: int, params: SamplingParams = GREEDY
) -> list[float]:
    """Times of the pieces, in seconds from the start; the last is that of the end."""
    started = time.perf_counter()
    number = f"{started}-{id(prompt)}"
    request = GenerateRequest(number, tuple(prompt), tokens, params, ignore_eos=True, chunking="token")
    times = []
    async for event in worker.submit(request):
        if isinstance(event, TextPiece):
            times.append(time.perf_counter() - started)
    return [*times, time.perf_counter() - started]


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


async def long_prompt_beside_a_stream() -> None:
    worker = await start(slots=4)
    alone = statistics.median([(await run(worker, words(3000, 10 + n), 1))[-1] for n in range(3)])
    stream = asyncio.create_task(run(worker, words(20, 1), 400))
    await asyncio.sleep(2)
    begun = time.perf_counter()
    await run(worker, words(3000, 20), 1)
    beside = time.perf_counter() - begun
    times = await stream
    usual = statistics.median(gaps(times)[:20])
    longest = max(gaps(times))
    print(f"1. gaps beside a 3,000-token prompt: usual {usual:.3f} s, longest {longest:.3f} s")
    print(f"   bound {1.2 * (usual + SLICE):.3f} s; the prompt took {beside:.1f} s, alone {alone:.1f} s")
    await worker.close()
    whole = await start(slots=4, prefill_chunk=4096)
    at_once = statistics.median([(await run(whole, words(3000, 30 + n), 1))[-1] for n in range(3)])
    print(f"   alone in chunks {alone:.2f} s, alone at once {at_once:.2f} s: {alone / at_once:.2f}")
    await whole.close()


async def shared_prefix() -> None:
    worker = await start(slots=4, prefix_cache=PrefixCacheSettings(bytes=256 << 20))
    prefix = words(2000, 3)
    first = (await run(worker, [*prefix, *words(20, 4)], 1))[0]
    second = (await run(worker, [*prefix, *words(20, 5)], 1))[0]
    print(f"2. first token, then with its 2,000-token prefix known: {first:.2f} s, {second:.2f} s")
    print(f"   1/{first / second:.1f}")
    await worker.close()


async def sixty_four_on_four_slots() -> None:
    worker = await start(slots=4)
    started = time.perf_counter()
    for batch in range(16):
        await asyncio.gather(*(run(worker, words(40, batch * 4 + n), 16) for n in range(4)))
    batches = time.perf_counter() - started
    started = time.perf_counter()
    await asyncio.gather(*(run(worker, words(40, 100 + n), 16) for n in range(64)))
    at_once = time.perf_counter() - started
    print(f"3. 64 requests on 4 slots: {at_once:.1f} s at once, {batches:.1f} s in 16 batches")
    print(f"   {at_once / batches:.2f}")
    await worker.close()


async def everything_sampled() -> None:
    worker = await start(slots=8)
    rich = SamplingParams(
        presence_penalty=0.2, frequency_penalty=0.2, repetition_penalty=1.1, logprobs=5, seed=1
    )
    speeds: dict[str, list[float]] = {"greedy": [], "rich": []}
    for round in range(4):
        for name, params in (("greedy", GREEDY), ("rich", rich)):
            times = await asyncio.gather(*(run(worker, words(20, n), 48, params) for n in range(8)))
            last = max(time[-1] for time in times)
            first = max(time[0] for time in times)
            if round:
                speeds[name].append(8 * 47 / (last - first))
    greedy, sampled = (statistics.median(speeds[name]) for name in speeds)
    print(f"4. batch of 8: greedy {greedy:.0f} tok/s, penalties, logprobs and seed {sampled:.0f} tok/s")
    print(f"   {sampled / greedy:.2f}")
    await worker.close()


async def drafts() -> None:
    text = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n" * 4
    times: dict[str, list[float]] = {}
    for name, lookup in (("plain", None), ("drafting", PromptLookupSettings(max_draft=8))):
        worker = await start(slots=2, speculative=SpeculativeSettings(prompt_lookup=lookup))
        copy = await worker.encode_chat([{"role": "user", "content": f"Repeat this code exactly:\n{text}"}])
        fresh = words(64, 7)
        times[name] = [
            statistics.median([t[-1] - t[0] for t in [await run(worker, prompt, 96) for _ in range(3)]])
            for prompt in (copy, fresh)
        ]
        await worker.close()
    copied, other = (
        plain / drafting for plain, drafting in zip(times["plain"], times["drafting"], strict=True)
    )
    print(
        f"5. drafts from the prompt: {copied:.2f} times as fast where it is repeated, {other:.2f} elsewhere"
    )


async def second_model_loads() -> None:
    gate = Gate()
    worker = await start(gate, slots=4)
    stream = asyncio.create_task(run(worker, words(20, 1), 300))
    await asyncio.sleep(3)
    begun = time.perf_counter()
    settings = MODEL.model_copy(update={"name": "second", "slots": 4, "max_context": 4096})
    other = Worker(
        WorkerOptions.of(settings), lambda: load_model(settings, fetch(settings.source), gate), gate
    )
    await other.start()
    loading = time.perf_counter() - begun
    times = await stream
    usual, longest = statistics.median(gaps(times)), max(gaps(times))
    print(f"6. gaps while a second model loads, which takes {loading:.1f} s: usual {usual:.3f} s,")
    print(f"   longest {longest:.3f} s")
    await other.close()
    await worker.close()


FIGURES = (
    long_prompt_beside_a_stream,
    shared_prefix,
    sixty_four_on_four_slots,
    everything_sampled,
    drafts,
    second_model_loads,
)


async def main(numbers: list[int]) -> None:
    for number in numbers or range(1, len(FIGURES) + 1):
        await FIGURES[number - 1]()


asyncio.run(main([int(number) for number in sys.argv[1:]]))
