"""Metrics that are read at each scrape instead of kept: of workers, models and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import add

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from emlxd.core import Distribution, WorkerCounts, WorkerStats
from emlxd.registry import Registry


@dataclass(frozen=True, slots=True)
class _Reading:
    """All workers of one model, which are two while one takes over from the other."""

    model: str
    workers: list[WorkerStats]
    counts: WorkerCounts | None


class Readings(Collector):
    """Waits for nobody: what a worker's thread changes meanwhile is a step older or newer.

    ``memory_use`` gives what MLX holds in bytes: ``active``, ``peak`` and ``cached``.
    """

    def __init__(self, registry: Registry, memory_use: Callable[[], Mapping[str, int]]) -> None:
        self._registry = registry
        self._memory_use = memory_use

    def collect(self) -> Iterator[Metric]:
        readings = [self._read(model) for model in self._models()]
        yield from _worker_gauges([reading for reading in readings if reading.workers])
        yield from _worker_counts([reading for reading in readings if reading.counts])
        yield from self._model_gauges()
        yield from self._loads()
        memory = GaugeMetricFamily("emlxd_mlx_memory_bytes", "What MLX holds of memory.", labels=["kind"])
        use = self._memory_use()
        for kind, key in (("active", "active"), ("peak", "peak"), ("cache", "cached")):
            memory.add_metric([kind], use[key])
        yield memory
        residents = self._registry.residents
        yield GaugeMetricFamily("emlxd_memory_budget_bytes", "What all models may take.", residents.budget)
        yield GaugeMetricFamily("emlxd_memory_counted_bytes", "What they are counted with.", residents.used)

    def _models(self) -> Iterable[str]:
        """All that are or were in memory."""
        residents = self._registry.residents
        return dict.fromkeys([*residents.gone, *(resident.settings.name for resident in residents)])

    def _read(self, model: str) -> _Reading:
        residents = self._registry.residents
        found = (r.worker.stats() for r in residents if r.settings.name == model)
        workers = [stats for stats in found if stats is not None]
        counts = [stats.counts for stats in workers]
        if model in residents.gone:
            counts.append(residents.gone[model])
        return _Reading(model, workers, reduce(add, counts) if counts else None)

    def _model_gauges(self) -> Iterator[Metric]:
        loaded = _gauge("model_loaded", "1 if the model is in memory and answers.")
        seconds = _gauge("model_load_seconds", "How long the last loading took.")
        heartbeat = _gauge("worker_heartbeat_age_seconds", "How long the step that runs has taken so far.")
        for entry in self._registry.models:
            resident = entry.usable
            loaded.add_metric([entry.name], int(resident is not None))
            if resident is not None:
                seconds.add_metric([entry.name], resident.load_seconds)
                heartbeat.add_metric([entry.name], resident.worker.heartbeat_age)
        yield from (loaded, seconds, heartbeat)

    def _loads(self) -> Iterator[Metric]:
        residents = self._registry.residents
        yield _counter("model_loads", "Loadings that ended.", "result", residents.loads)
        yield _counter("model_unloads", "Models that left memory.", "reason", residents.unloads)


def _worker_gauges(readings: Iterable[_Reading]) -> Iterator[Metric]:
    running = _gauge("requests_running", "Answers that are being generated.")
    waiting = _gauge("requests_waiting", "Answers that wait for a slot.")
    slots = _gauge("slots", "How many answers can be generated together.")
    usage = _gauge("kv_cache_usage_ratio", "Share of the K/V cache's positions that are written.")
    memory = GaugeMetricFamily(
        "emlxd_model_memory_bytes", "What the model holds of memory.", labels=["model", "part"]
    )
    for reading in readings:
        name, workers = reading.model, reading.workers
        running.add_metric([name], sum(stats.running for stats in workers))
        waiting.add_metric([name], sum(stats.waiting for stats in workers))
        slots.add_metric([name], sum(stats.slots for stats in workers))
        written, positions = sum(s.kv_tokens for s in workers), sum(s.kv_capacity for s in workers)
        usage.add_metric([name], written / positions if positions else 0.0)
        held: Counter[str] = Counter()
        for stats in workers:
            held.update(stats.memory)
        for part, size in held.items():
            memory.add_metric([name, part], size)
    yield from (running, waiting, slots, usage, memory)


def _worker_counts(readings: Iterable[_Reading]) -> Iterator[Metric]:
    queried = CounterMetricFamily(
        "emlxd_prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache.", labels=["model"]
    )
    hit = CounterMetricFamily(
        "emlxd_prefix_cache_hit_tokens", "Prompt tokens that the prefix cache had.", labels=["model"]
    )
    traces = CounterMetricFamily(
        "emlxd_compiled_traces",
        "Decode steps traced for compiling; steady when all is well.",
        labels=["model"],
    )
    steps = _histogram("step_seconds", "One step of the engine.")
    sizes = _histogram("step_batch_size", "Answers that decode in a step.")
    gaps = _histogram("inter_token_latency_seconds", "Between two tokens of an answer.")
    for reading in readings:
        counts = reading.counts
        if counts is None:
            continue
        name = [reading.model]
        queried.add_metric(name, counts.prefix_query_tokens)
        hit.add_metric(name, counts.prefix_hit_tokens)
        traces.add_metric(name, counts.traces)
        steps.add_metric(name, _buckets(counts.step_seconds), counts.step_seconds.total)
        sizes.add_metric(name, _buckets(counts.step_batch_size), counts.step_batch_size.total)
        gaps.add_metric(name, _buckets(counts.inter_token_seconds), counts.inter_token_seconds.total)
    yield from (queried, hit, traces, steps, sizes, gaps)


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"emlxd_{name}", text, labels=["model"])


def _histogram(name: str, text: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(f"emlxd_{name}", text, labels=["model"])


def _counter(name: str, text: str, label: str, values: Mapping[tuple[str, str], int]) -> Metric:
    family = CounterMetricFamily(f"emlxd_{name}", text, labels=["model", label])
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """As Prometheus wants them: each counts those before it too."""
    bounds = (*map(floatToGoString, distribution.bounds), "+Inf")
    return list(zip(bounds, accumulate(distribution.counts), strict=True))
