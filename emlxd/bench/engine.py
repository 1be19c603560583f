"""Measures the engine without HTTP, and mlx-lm on the same files in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from emlxd.config import ModelSettings, PrefixCacheSettings, Source
from emlxd.core import SamplingParams
from emlxd.errors import UserError
from emlxd.graph.batch import Begin, PrefillRow
from emlxd.graph.open import open_runner
from emlxd.graph.random_model import copy_bandwidth
from emlxd.graph.runner import MlxRunner

OURS: Final = "emlxd"
GREEDY: Final = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``prompt`` and ``tokens`` are per stream."""

    streams: tuple[int, ...] = (1, 8, 32)
    prompt: int = 512
    tokens: int = 128
    repeats: int = 5


@dataclass(frozen=True, slots=True)
class Measure:
    """Of one repeat. ``dispatch`` is the host's share of a decode step, in seconds."""

    prefill: float
    decode: float
    dispatch: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """Medians in tokens a second, all streams together, and the lowest and highest of the repeats.

    ``dispatch_ms`` is the host's part of a step. ``ceiling`` is the share of the steps a second that reading
    what a step needs of the weights (``Transformer.bytes_read``), once, at the speed of a copy would allow;
    both are None for mlx-lm.
    """

    name: str
    streams: int
    prefill: float
    decode: float
    decode_range: tuple[float, float]
    dispatch_ms: float | None = None
    ceiling: float | None = None


Run = Callable[[int], Measure]


def measure(folder: Path, options: EngineOptions, *, peer: bool) -> Iterator[Line]:
    """Both programs take turns, repeat by repeat, so that a drift of the machine hits both.

    Raises UserError where mlx-lm is asked for and is not installed.
    """
    ours = _Ours(folder, options)
    runs: dict[str, Run] = {OURS: ours.run}
    if peer:
        runs["mlx-lm"] = _Peer(folder, options).run
    bandwidth = copy_bandwidth()
    for streams in options.streams:
        taken: dict[str, list[Measure]] = {name: [] for name in runs}
        for repeat in range(options.repeats + 1):
            for name, run in runs.items():
                one = run(streams)
                if repeat:  # the first compiles
                    taken[name].append(one)
        most = bandwidth / ours.bytes_read(streams)
        for name, measures in taken.items():
            line = _line(name, streams, measures)
            yield replace(line, ceiling=line.decode / streams / most) if name == OURS else line


def _line(name: str, streams: int, measures: Sequence[Measure]) -> Line:
    decode = [one.decode for one in measures]
    dispatch = [one.dispatch for one in measures if one.dispatch is not None]
    return Line(
        name,
        streams,
        statistics.median(one.prefill for one in measures),
        statistics.median(decode),
        (min(decode), max(decode)),
        statistics.median(dispatch) * 1000 if dispatch else None,
    )


def _prompt(length: int, stream: int) -> list[int]:
    return [(i * 31 + stream * 17) % 5000 + 10 for i in range(length)]


class _Ours:
    def __init__(self, folder: Path, options: EngineOptions) -> None:
        self._options = options
        self._runner: MlxRunner = open_runner(
            folder,
            ModelSettings(
                name="bench",
                source=Source(path=folder),
                slots=max(options.streams),
                max_context=max(64, 1 << (options.prompt + options.tokens).bit_length()),
                prefix_cache=PrefixCacheSettings(bytes=0),
            ),
        )

    def bytes_read(self, streams: int) -> int:
        return self._runner.bytes_read(streams)

    def run(self, streams: int) -> Measure:
        """Prefills ``streams`` prompts, then decodes them together, one step ahead of what is read."""
        options, runner = self._options, self._runner
        started = time.perf_counter()
        for stream in range(streams):
            tokens = tuple(_prompt(options.prompt, stream))
            pending = runner.prefill([PrefillRow(stream, 0, tokens, Begin(GREEDY, tokens))])
        pending.read()
        prefilled = time.perf_counter()
        dispatch = 0.0
        for step in range(options.tokens):
            at = time.perf_counter()
            following = runner.decode([options.prompt + step] * streams)
            dispatch += time.perf_counter() - at
            pending.read()
            pending = following
        pending.read()
        ended = time.perf_counter()
        return Measure(
            options.prompt * streams / (prefilled - started),
            options.tokens * streams / (ended - prefilled),
            dispatch / options.tokens,
        )


class _Peer:
    """mlx-lm's own batching generator."""

    def __init__(self, folder: Path, options: EngineOptions) -> None:
        try:
            from mlx_lm.utils import load_model
        except ImportError:
            raise UserError("mlx-lm is not installed: `pip install mlx-lm`.") from None

        self._options = options
        self._model: Any = load_model(folder)[0]

    def run(self, streams: int) -> Measure:
        from mlx_lm.generate import BatchGenerator

        options = self._options
        generator = BatchGenerator(self._model, max_tokens=options.tokens + 1, completion_batch_size=streams)
        started = time.perf_counter()
        generator.insert([_prompt(options.prompt, stream) for stream in range(streams)])
        counts: dict[int, int] = {}
        while len(counts) < streams:
            self._count(generator, counts)
        prefilled, before = time.perf_counter(), sum(counts.values())
        while sum(counts.values()) < (options.tokens + 1) * streams:
            self._count(generator, counts)
        ended = time.perf_counter()
        generator.close()  # type: ignore[no-untyped-call]
        generated = sum(counts.values()) - before
        return Measure(options.prompt * streams / (prefilled - started), generated / (ended - prefilled))

    @staticmethod
    def _count(generator: Any, counts: dict[int, int]) -> None:
        for response in generator.next_generated():
            counts[response.uid] = counts.get(response.uid, 0) + 1
