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
from emlxd.graph.operations import counted_operations
from emlxd.graph.random_model import copy_bandwidth
from emlxd.graph.runner import MlxRunner

OURS: Final = "emlxd"
GREEDY: Final = SamplingParams(temperature=0.0)
ALONE: Final = 16  # steps that are dispatched one by one


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``prompt`` and ``tokens`` are per stream."""

    streams: tuple[int, ...] = (1, 8, 32)
    prompt: int = 512
    tokens: int = 128
    repeats: int = 5


@dataclass(frozen=True, slots=True)
class Measure:
    """Of one repeat: tokens a second, and seconds of a step, as in ``Line``."""

    prefill: float
    decode: float
    host: float | None = None
    device: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """Medians, and the lowest and highest of the repeats; rates in tokens a second, all streams together.

    ``step_ms`` is the time from step to step where each is dispatched while the one before runs. What it
    is made of is taken from steps dispatched to an idle device and waited for: ``host_ms`` until all of
    the step is dispatched, ``device_ms`` from then on. The device may have begun before, so it takes
    ``device_ms`` at least and ``step_ms`` at most; if a step is one kernel, ``device_ms`` is all of it.
    ``ceiling`` is the share of the steps a second that there would be if each took the time of reading
    the weights that it needs, once, as fast as a copy (``Transformer.bytes_read``). These three are None
    for mlx-lm. ``operations`` are those of a step, as ``emlxd.graph.operations`` counts them.
    """

    name: str
    streams: int
    prefill: float
    prefill_range: tuple[float, float]
    decode: float
    decode_range: tuple[float, float]
    step_ms: float
    operations: int
    host_ms: float | None = None
    device_ms: float | None = None
    ceiling: float | None = None


Run = Callable[[int], Measure]


def measure(folder: Path, options: EngineOptions, *, peer: bool) -> Iterator[Line]:
    """Both programs take turns, repeat by repeat, so that a drift of the machine hits both.

    Raises UserError where mlx-lm is asked for and is not installed.
    """
    ours = Engine(folder, options)
    runs: dict[str, Run] = {OURS: ours.run}
    if peer:
        runs["mlx-lm"] = _Peer(folder, options).run
    bandwidth = copy_bandwidth()
    for streams in options.streams:
        # The first repeat compiles, so it has the time for counting.
        operations = {name: _operations(run, streams) for name, run in runs.items()}
        taken: dict[str, list[Measure]] = {name: [] for name in runs}
        for _ in range(options.repeats):
            for name, run in runs.items():
                taken[name].append(run(streams))
        most = bandwidth / ours.bytes_read(streams)
        for name, measures in taken.items():
            line = _line(name, streams, measures, operations[name])
            yield replace(line, ceiling=line.decode / streams / most) if name == OURS else line


def _operations(run: Run, streams: int) -> int:
    with counted_operations() as counts:
        run(streams)
    return counts[-1]  # that of the last decode step


def _line(name: str, streams: int, measures: Sequence[Measure], operations: int) -> Line:
    prefill = [one.prefill for one in measures]
    decode = [one.decode for one in measures]
    return Line(
        name,
        streams,
        statistics.median(prefill),
        (min(prefill), max(prefill)),
        statistics.median(decode),
        (min(decode), max(decode)),
        1000 * streams / statistics.median(decode),
        operations,
        _median_ms([one.host for one in measures]),
        _median_ms([one.device for one in measures]),
    )


def _median_ms(seconds: Sequence[float | None]) -> float | None:
    known = [one for one in seconds if one is not None]
    return 1000 * statistics.median(known) if known else None


def max_context(options: EngineOptions) -> int:
    """Of each slot: the next power of two."""
    return max(64, 1 << (options.prompt + options.tokens).bit_length())


def _prompt(length: int, stream: int) -> list[int]:
    return [(i * 31 + stream * 17) % 5000 + 10 for i in range(length)]


class Engine:
    """emlxd without a server, on a model's folder."""

    def __init__(self, folder: Path, options: EngineOptions) -> None:
        self._options = options
        self._runner: MlxRunner = open_runner(
            folder,
            ModelSettings(
                name="bench",
                source=Source(path=folder),
                slots=max(options.streams),
                max_context=max_context(options),
                prefix_cache=PrefixCacheSettings(bytes=0),
            ),
        )

    def bytes_read(self, streams: int) -> int:
        """Of the weights, by a step."""
        return self._runner.bytes_read(streams)

    def close(self) -> None:
        """Frees the model."""
        self._runner.close()

    def run(self, streams: int) -> Measure:
        """Prefills ``streams`` prompts, then decodes them together, one step ahead of what is read."""
        options, runner = self._options, self._runner
        started = time.perf_counter()
        for stream in range(streams):
            tokens = tuple(_prompt(options.prompt, stream))
            pending = runner.prefill([PrefillRow(stream, 0, tokens, Begin(GREEDY, tokens))])
        pending.read()
        prefilled = time.perf_counter()
        for step in range(options.tokens):
            following = runner.decode([options.prompt + step] * streams)
            pending.read()
            pending = following
        pending.read()
        ended = time.perf_counter()
        return Measure(
            options.prompt * streams / (prefilled - started),
            options.tokens * streams / (ended - prefilled),
            *self._split(streams),
        )

    def _split(self, streams: int) -> tuple[float, float]:
        """Seconds of the host and of the device for a step alone: the last steps once more."""
        last = self._options.prompt + self._options.tokens
        parts = []
        for position in range(last - min(ALONE, self._options.tokens), last):
            started = time.perf_counter()
            pending = self._runner.decode([position] * streams)
            dispatched = time.perf_counter()
            pending.read()
            parts.append((dispatched - started, time.perf_counter() - dispatched))
        host, device = zip(*parts, strict=True)
        return statistics.median(host), statistics.median(device)


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
