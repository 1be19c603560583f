"""Metrics that are read at each scrape instead of kept: of workers, models and memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Final

from emlxd.core import Distribution, WorkerCounts, WorkerStats
from emlxd.instruments import AnyFamily, Family, HistogramFamily, Labels
from emlxd.registry import Registry

RESULTS: Final = ("success", "failure")


@dataclass(frozen=True, slots=True)
class _Reading:
    """All workers of one model, which are two while one takes over from the other."""

    model: str
    workers: list[WorkerStats]
    counts: WorkerCounts


class Readings:
    """Waits for nobody: what a worker's thread changes meanwhile is a step older or newer.

    ``memory_use`` gives what MLX holds in bytes: ``active``, ``peak`` and ``cached``.
    """

    def __init__(self, registry: Registry, memory_use: Callable[[], Mapping[str, int]]) -> None:
        self._registry = registry
        self._memory_use = memory_use

    def collect(self) -> Iterator[AnyFamily]:
        readings = list(self._read())
        yield from _worker_gauges([reading for reading in readings if reading.workers])
        yield from _worker_counts(readings)
        yield from self._model_gauges()
        yield from self._loads()
        yield from self._memory()

    def _read(self) -> Iterator[_Reading]:
        """One for each model that is or was in memory."""
        residents = self._registry.residents
        workers: defaultdict[str, list[WorkerStats]] = defaultdict(list)
        for resident in residents:
            if stats := resident.worker.stats():
                workers[resident.settings.name].append(stats)
        for model in dict.fromkeys([*residents.counts_of_gone, *workers]):
            counts = [stats.counts for stats in workers[model]]
            if model in residents.counts_of_gone:
                counts.append(residents.counts_of_gone[model])
            yield _Reading(model, workers[model], reduce(add, counts))

    def _model_gauges(self) -> Iterator[Family]:
        models = [(entry.name, entry.usable) for entry in self._registry.models]
        loaded = [(name, resident) for name, resident in models if resident is not None]
        yield _gauge(
            "model_loaded",
            "1 if the model is in memory and answers.",
            {name: int(resident is not None) for name, resident in models},
        )
        yield _gauge(
            "model_load_seconds",
            "How long the last loading took.",
            {name: resident.load_seconds for name, resident in loaded},
        )
        yield _gauge(
            "worker_heartbeat_age_seconds",
            "How long the step that runs has taken so far.",
            {name: resident.worker.heartbeat_age for name, resident in loaded},
        )

    def _loads(self) -> Iterator[Family]:
        residents = self._registry.residents
        # Prometheus sees no increase in a series that only begins with the first failure.
        none = {(entry.name, result): 0 for entry in self._registry.models for result in RESULTS}
        loads = none | residents.loads
        yield _counter("model_loads", "Loadings that ended.", ("model", "result"), loads)
        yield _counter("model_unloads", "Models that left memory.", ("model", "reason"), residents.unloads)

    def _memory(self) -> Iterator[Family]:
        use, residents = self._memory_use(), self._registry.residents
        held: dict[Labels, float] = {
            ("active",): use["active"],
            ("peak",): use["peak"],
            ("cache",): use["cached"],
        }
        yield Family("emlxd_mlx_memory_bytes", "gauge", "What MLX holds of memory.", ("kind",), held)
        for name, text, size in (
            ("budget", "What all models may take.", residents.budget),
            ("counted", "What they are counted with.", residents.used),
        ):
            yield Family(f"emlxd_memory_{name}_bytes", "gauge", text, (), {(): size})


def _worker_gauges(readings: Iterable[_Reading]) -> Iterator[Family]:
    def gauge(name: str, text: str, read: Callable[[list[WorkerStats]], float]) -> Family:
        return _gauge(name, text, {reading.model: read(reading.workers) for reading in readings})

    yield gauge(
        "requests_running", "Answers that are being generated.", lambda all: sum(s.running for s in all)
    )
    yield gauge("requests_waiting", "Answers that wait for a slot.", lambda all: sum(s.waiting for s in all))
    yield gauge("slots", "How many answers can be generated together.", lambda all: sum(s.slots for s in all))
    yield gauge("kv_cache_usage_ratio", "Share of the K/V cache's positions that are written.", _cache_usage)
    yield _model_memory(readings)


def _cache_usage(workers: Iterable[WorkerStats]) -> float:
    positions = sum(stats.kv_capacity for stats in workers)
    return sum(stats.kv_tokens for stats in workers) / positions if positions else 0.0


def _model_memory(readings: Iterable[_Reading]) -> Family:
    held: Counter[Labels] = Counter()
    for reading in readings:
        for stats in reading.workers:
            held.update({(reading.model, part): size for part, size in stats.memory.items()})
    return Family(
        "emlxd_model_memory_bytes", "gauge", "What the model holds of memory.", ("model", "part"), held
    )


def _worker_counts(readings: Iterable[_Reading]) -> Iterator[AnyFamily]:
    def counter(name: str, text: str, read: Callable[[WorkerCounts], int]) -> Family:
        values: dict[Labels, int] = {(reading.model,): read(reading.counts) for reading in readings}
        return _counter(name, text, ("model",), values)

    def histogram(name: str, text: str, read: Callable[[WorkerCounts], Distribution]) -> HistogramFamily:
        values: dict[Labels, Distribution] = {(reading.model,): read(reading.counts) for reading in readings}
        return HistogramFamily(f"emlxd_{name}", text, ("model",), values)

    yield counter(
        "prefix_cache_query_tokens",
        "Prompt tokens looked up in the prefix cache.",
        lambda counts: counts.prefix_query_tokens,
    )
    yield counter(
        "prefix_cache_hit_tokens",
        "Prompt tokens that the prefix cache had.",
        lambda counts: counts.prefix_hit_tokens,
    )
    yield counter(
        "compiled_traces",
        "Decode steps traced for compiling; steady when all is well.",
        lambda counts: counts.traces,
    )
    yield histogram("step_seconds", "One step of the engine.", lambda counts: counts.step_seconds)
    yield histogram(
        "step_batch_size", "Answers that decode in a step.", lambda counts: counts.step_batch_size
    )
    yield histogram(
        "inter_token_latency_seconds",
        "Between two tokens of an answer.",
        lambda counts: counts.inter_token_seconds,
    )


def _gauge(name: str, text: str, values: Mapping[str, float]) -> Family:
    return Family(f"emlxd_{name}", "gauge", text, ("model",), {(model,): v for model, v in values.items()})


def _counter(name: str, text: str, labels: Labels, values: Mapping[Labels, int]) -> Family:
    return Family(f"emlxd_{name}", "counter", text, labels, values)
