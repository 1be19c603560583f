"""What it costs to hold answers of the default model to a JSON schema: two ratios, each within one run.

python benchmarks/constrained.py
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from emlxd.config import PrefixCacheSettings
from emlxd.config_file import load
from emlxd.core import GenerateRequest, SamplingParams, Shape, TextPiece
from emlxd.sources import fetch
from emlxd.text.dialect import Wishes
from emlxd.text.grammar import json_schema_grammar
from emlxd.worker.gate import Gate
from emlxd.worker.load import load_model
from emlxd.worker.worker import Worker, WorkerOptions

MODEL = (
    load(Path("config/config.yaml"))
    .models[0]
    .model_copy(update={"slots": 8, "max_context": 1024, "prefix_cache": PrefixCacheSettings(bytes=0)})
)
TOKENS, ROUNDS = 96, 5
# An answer that is not over before its last token.
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]+$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["reader", "writer", "admin"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "age", "role", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 100}


async def rate(worker: Worker, prompt: Sequence[int], shape: Shape, number: int) -> float:
    """Tokens a second from the first token on."""
    params = SamplingParams(temperature=1.0, seed=number)
    request = GenerateRequest(
        f"{time.perf_counter()}-{number}",
        tuple(prompt),
        TOKENS,
        params,
        ignore_eos=True,
        chunking="token",
        shape=shape,
    )
    first = None
    async for event in worker.submit(request):
        if first is None and isinstance(event, TextPiece):
            first = time.perf_counter()
    assert first is not None
    return (TOKENS - 1) / (time.perf_counter() - first)


async def main() -> None:
    worker = Worker(WorkerOptions.of(MODEL), lambda: load_model(MODEL, fetch(MODEL.source)), Gate())
    await worker.start()
    prompt = await worker.encode_chat([{"role": "user", "content": "Make up some people, as JSON."}])
    free = Shape()
    held = await worker.shape(prompt, Wishes(grammar=json_schema_grammar(SCHEMA, "schema")))
    batches = {"free": [free] * 8, "held": [held] * 8, "mixed": [free] * 4 + [held] * 4}
    rates: dict[str, list[float]] = {name: [] for name in batches}
    for round in range(ROUNDS + 1):  # the first traces and compiles
        for name, shapes in batches.items():
            found = await asyncio.gather(*(rate(worker, prompt, s, n) for n, s in enumerate(shapes)))
            # Of a mixed batch, those without a schema count.
            rates[name].append(sum(found[:4]) if name == "mixed" else sum(found))
            if round == 0:
                rates[name].clear()
    await worker.close()
    free_rate, held_rate, beside = (statistics.median(rates[name]) for name in batches)
    print(f"8 answers, free: {free_rate:.0f} tokens/s; held to a schema: {held_rate:.0f} tokens/s")
    print(f"   {held_rate / free_rate:.2f}")
    print(f"4 free answers beside 4 free ones: {free_rate / 2:.0f} tokens/s; beside 4 held: {beside:.0f}")
    print(f"   {beside / (free_rate / 2):.2f}")


asyncio.run(main())
