"""What serving costs: the engine alone, and the same engine behind HTTP, by turns in one run.

python benchmarks/http_overhead.py SHAPE|FOLDER [--bits N] [--streams N] [--one-copy]

SHAPE is one of `emlxd bench --engine`, written with random weights and a made-up tokenizer; FOLDER is a model
with its tokenizer. Both sides decode greedily, all streams together, and keep no prefixes. The daemon is a
process of its own, this one is the client. Both have a copy of the model; --one-copy loads them by turns.

decode: tokens a second while every stream decodes; behind HTTP that is from when the last one has its first
text until the first one has its last. whole: all tokens over the time from the prompts to the last token.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import daemon
from made_up_tokenizer import write_tokenizer

from emlxd.bench.client import post_events
from emlxd.bench.engine import Engine, EngineOptions, max_context
from emlxd.bench.prompts import make_prompt
from emlxd.graph.random_model import SHAPES, write_model

WARMUP = 2  # rounds: slots fill up one by one, and each number of rows is compiled


@dataclass(frozen=True)
class Rates:
    """Of one round, in tokens a second. ``client`` is the share of a core that the client took."""

    decode: float
    whole: float
    client: float = 0.0


Round = Callable[[], Rates]


@contextmanager
def alone(folder: Path, options: EngineOptions) -> Iterator[Round]:
    streams = options.streams[0]

    def run() -> Rates:
        one = thread.submit(engine.run, streams).result()
        took = options.prompt * streams / one.prefill + options.tokens * streams / one.decode
        return Rates(one.decode, (options.tokens + 1) * streams / took)

    with ThreadPoolExecutor(1) as thread:  # a freed model takes MLX's streams of its thread with it
        engine = thread.submit(Engine, folder, options).result()
        try:
            run()
            yield run
        finally:
            thread.submit(engine.close).result()


@contextmanager
def served(folder: Path, options: EngineOptions) -> Iterator[Round]:
    model = {
        "name": "bench",
        "source": {"path": str(folder)},
        "slots": options.streams[0],
        "max_context": max_context(options),
        "prefix_cache": {"bytes": 0},
    }
    with daemon.running({"models": [model]}) as port:
        url = f"http://127.0.0.1:{port}"
        for _ in range(WARMUP):
            asyncio.run(one_round(url, options))
        yield lambda: asyncio.run(one_round(url, options))


@dataclass(frozen=True)
class Stream:
    """When text arrived and how many characters, and how many tokens that were."""

    arrivals: list[tuple[float, int]]
    tokens: int

    def tokens_between(self, start: float, end: float) -> float:
        """By characters: a chunk may hold several tokens."""
        part = sum(length for at, length in self.arrivals if start < at <= end)
        return self.tokens * part / sum(length for _, length in self.arrivals)


async def one_round(url: str, options: EngineOptions) -> Rates:
    started, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(url, options)) for _ in range(options.streams[0])]
    ended, cpu = time.perf_counter(), time.process_time() - cpu
    streams = [task.result() for task in tasks]
    all_begun = max(stream.arrivals[0][0] for stream in streams)
    first_done = min(stream.arrivals[-1][0] for stream in streams)
    if first_done <= all_begun:
        sys.exit("An answer ended before the last one began: take more --tokens.")
    together = sum(stream.tokens_between(all_begun, first_done) for stream in streams)
    whole = sum(stream.tokens for stream in streams) / (ended - started)
    return Rates(together / (first_done - all_begun), whole, cpu / (ended - started))


async def ask(url: str, options: EngineOptions) -> Stream:
    body = {
        "model": "bench",
        "messages": [{"role": "user", "content": make_prompt(options.prompt, uuid.uuid4().hex)}],
        "max_tokens": options.tokens + 1,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    arrivals, tokens = [], 0
    async with post_events(f"{url}/v1/chat/completions", body, {}, timeout=600) as events:
        async for event in events:
            if usage := event.get("usage"):
                tokens = usage["completion_tokens"]
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    arrivals.append((time.perf_counter(), len(text)))
    return Stream(arrivals, tokens)


def pairs(folder: Path, options: EngineOptions, one_copy: bool) -> Iterator[tuple[Rates, Rates]]:
    """Of each repeat: the engine alone, and behind HTTP."""
    if not one_copy:
        with alone(folder, options) as engine, served(folder, options) as http:
            yield from ((engine(), http()) for _ in range(options.repeats))
        return
    for _ in range(options.repeats):
        with alone(folder, options) as engine:
            first = engine()
        with served(folder, options) as http:
            yield first, http()


def report(measured: list[tuple[Rates, Rates]]) -> None:
    for name in ("decode", "whole"):
        engine, http = ([getattr(rates, name) for rates in side] for side in zip(*measured, strict=True))
        ratio = [b / a for a, b in zip(engine, http, strict=True)]
        print(f"{name}: {spread(engine)} tok/s alone, {spread(http)} behind HTTP")
        print(f"   {statistics.median(ratio):.2f} ({min(ratio):.2f} to {max(ratio):.2f})")
    client = max(http.client for _, http in measured)
    print(f"the client took {client:.0%} of a core at most")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", metavar="SHAPE|FOLDER", help=f"{', '.join(SHAPES)}, or a folder")
    parser.add_argument("--bits", type=int)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one-copy", action="store_true")
    wanted = parser.parse_args()
    if wanted.model not in SHAPES and not Path(wanted.model).is_dir():
        parser.error(f"{wanted.model} is neither a folder nor one of {', '.join(SHAPES)}")
    options = EngineOptions((wanted.streams,), wanted.prompt, wanted.tokens, wanted.repeats)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(wanted.model)
        if wanted.model in SHAPES:
            folder = write_model(Path(place) / "model", wanted.model, wanted.bits)
            write_tokenizer(folder)
        report(list(pairs(folder, options, wanted.one_copy)))


main()
