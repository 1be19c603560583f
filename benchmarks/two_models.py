"""Two models in one daemon, each on its own thread and under load, for minutes.

python benchmarks/two_models.py SHAPE[:BITS] SHAPE[:BITS] [--minutes 10] [--streams 8]

SHAPE is one of `emlxd bench --engine`, written with random weights and a made-up tokenizer. Every stream
sends one request after the other, with prompts and answers of all lengths, greedy and sampled. Each minute it
prints what was answered; an answer that fails or has not the tokens that were asked for makes the exit
status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path

import daemon
from made_up_tokenizer import write_tokenizer

from emlxd.bench.client import post_events
from emlxd.bench.prompts import make_prompt
from emlxd.graph.random_model import write_model

CONTEXT = 2048
PROMPTS = (16, 1024)  # tokens
ANSWERS = (1, 256)


class Load:
    """Requests to all models until ``end``, in seconds of the clock; ``failures`` has what went wrong."""

    def __init__(self, url: str, end: float) -> None:
        self._url = url
        self._end = end
        self.answers: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.failures: list[str] = []

    async def run(self, models: list[str], streams: int) -> None:
        async with asyncio.TaskGroup() as group:
            for index in range(streams):
                for model in models:
                    group.create_task(self._stream(model, random.Random(index)))
            group.create_task(self._report())

    async def _stream(self, model: str, chance: random.Random) -> None:
        while time.monotonic() < self._end:
            wanted = chance.randint(*ANSWERS)
            text = make_prompt(chance.randint(*PROMPTS), uuid.uuid4().hex)
            body = {
                "model": model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": wanted,
                "temperature": chance.choice((0, 1)),
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            try:
                tokens = await self._ask(body)
            except Exception as error:
                self.failures.append(f"{model}: {error!r}")
                await asyncio.sleep(1)
                continue
            if tokens != wanted:
                self.failures.append(f"{model}: {tokens} tokens instead of {wanted}")
            self.answers[model] += 1
            self.tokens[model] += tokens

    async def _ask(self, body: dict[str, object]) -> int:
        """The tokens of the answer."""
        tokens = 0
        async with post_events(f"{self._url}/v1/chat/completions", body, {}, timeout=120) as events:
            async for event in events:
                if usage := event.get("usage"):
                    tokens = usage["completion_tokens"]
        return tokens

    async def _report(self) -> None:
        started = time.monotonic()
        while (left := self._end - time.monotonic()) > 0:
            await asyncio.sleep(min(60, left))
            parts = [
                f"{name} {self.answers[name]} answers, {self.tokens[name]} tokens" for name in self.answers
            ]
            print(
                f"{time.monotonic() - started:.0f} s: {'; '.join(parts)}; {len(self.failures)} failed",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs=2, metavar="SHAPE[:BITS]")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--streams", type=int, default=8, help="for each model (default: 8)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        entries = []
        for index, model in enumerate(options.models):
            shape, _, bits = model.partition(":")
            folder = write_model(Path(place) / str(index), shape, int(bits) if bits else None)
            write_tokenizer(folder)
            entries.append(
                {
                    "name": f"{index}-{shape}",
                    "source": {"path": str(folder)},
                    "slots": options.streams,
                    "max_context": CONTEXT,
                }
            )
        with daemon.running({"models": entries}) as port:
            load = Load(f"http://127.0.0.1:{port}", time.monotonic() + 60 * options.minutes)
            asyncio.run(load.run([str(entry["name"]) for entry in entries], options.streams))
    print("\n".join(load.failures[:20]) or "all were answered")
    sys.exit(1 if load.failures or len(load.answers) < 2 else 0)


if __name__ == "__main__":
    main()
