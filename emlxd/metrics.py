"""Every instrument, in a registry of its own: two servers in one process count apart.

Labels have few values by construction: model names come from the configuration, routes from the
URL map, and methods from a fixed list.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from emlxd.core import Timing, Usage
from emlxd.vllm_names import vllm_families

FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKEN_BUCKETS = tuple(2**power for power in range(18))
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


@cache
def package_version(package: str = "emlxd") -> str:
    """The installed version of ``package``, or "unknown" when it runs without being installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


class Metrics:
    """What emlxd counts and times. ``device`` is what the models run on."""

    def __init__(self, *, device: str) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        build = self._gauge("build_info", "What runs here; always 1.", "version", "mlx_version", "device")
        build.labels(package_version(), package_version("mlx"), device).set(1)

        self._requests = self._counter(
            "requests", "Generations that ended.", "model", "endpoint", "finish_reason"
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens read.", "model")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.", "model")
        self._first_token = self._seconds(
            "time_to_first_token", "From the request's arrival to its first text.", FIRST_TOKEN_BUCKETS
        )
        self._duration = self._seconds("request_duration", "From arrival to the last event.")
        self._queue = self._seconds("request_queue", "Spent waiting for a slot.")
        self._prefill = self._seconds("request_prefill", "Spent reading the prompt.")
        self._decode = self._seconds("request_decode", "Spent generating.")
        self._request_prompt = self._tokens("request_prompt_tokens", "Prompt tokens of a generation.")
        self._request_generation = self._tokens("request_generation_tokens", "Tokens of a generation.")

        self._http_requests = self._counter(
            "http_requests", "HTTP requests that ended.", "route", "method", "status"
        )
        self._http_duration = Histogram(
            "emlxd_http_request_duration_seconds",
            "From an HTTP request's headers to the last byte of its answer.",
            ("route", "method", "status"),
            buckets=REQUEST_BUCKETS,
            registry=self._registry,
        )

        self._reloads = self._counter("config_reloads", "Reloads of the configuration.", "result")
        self._reload_ok = self._gauge("config_last_reload_successful", "1 if the last reload was, 0 if not.")
        self._reload_time = self._gauge(
            "config_last_reload_success_timestamp_seconds", "When the configuration in force was loaded."
        )
        for result in ("changed", "unchanged", "failed"):
            self._reloads.labels(result)
        self._reload_ok.set(1)
        self._reload_time.set_to_current_time()

    def add_collector(self, collector: Collector) -> None:
        """Readings that are taken at each scrape: the gauges of engines, memory and workers."""
        self._registry.register(collector)

    def exposition(self, accept: str, *, vllm_names: bool = False) -> tuple[bytes, str]:
        """All readings in the format that the ``Accept`` header asks for, and its content type.

        ``vllm_names`` adds those that vLLM has too, under its names.
        """
        encode, content_type = choose_encoder(accept)
        return encode(_Exposed(self._registry, vllm_names=vllm_names)), content_type

    def first_token(self, model: str, seconds: float) -> None:
        self._first_token.labels(model).observe(seconds)

    def prompt_read(self, model: str, usage: Usage) -> None:
        """A prompt was answered, once or several times."""
        self._prompt_tokens.labels(model).inc(usage.prompt_tokens)
        self._request_prompt.labels(model).observe(usage.prompt_tokens)

    def generation_finished(self, model: str, usage: Usage, timing: Timing) -> None:
        """A generation came to its own end."""
        self._generation_tokens.labels(model).inc(usage.completion_tokens)
        self._request_generation.labels(model).observe(usage.completion_tokens)
        self._queue.labels(model).observe(timing.queue)
        self._prefill.labels(model).observe(timing.prefill)
        self._decode.labels(model).observe(timing.decode)

    def request_ended(self, model: str, endpoint: str, finish_reason: str, seconds: float) -> None:
        """``finish_reason`` is the API's, or "abort" (the client left) or "error"."""
        self._requests.labels(model, endpoint, finish_reason).inc()
        self._duration.labels(model).observe(seconds)

    def reloaded(self, result: str) -> None:
        """``result`` is "changed", "unchanged" or "failed"."""
        self._reloads.labels(result).inc()
        self._reload_ok.set(result != "failed")
        if result == "changed":
            self._reload_time.set_to_current_time()

    def http_request(self, route: str, method: str, status: int, seconds: float) -> None:
        labels = (route, method if method in METHODS else "other", str(status))
        self._http_requests.labels(*labels).inc()
        self._http_duration.labels(*labels).observe(seconds)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"emlxd_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"emlxd_{name}", text, labels, registry=self._registry)

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...] = REQUEST_BUCKETS) -> Histogram:
        return Histogram(f"emlxd_{name}_seconds", text, ("model",), buckets=buckets, registry=self._registry)

    def _tokens(self, name: str, text: str) -> Histogram:
        return Histogram(f"emlxd_{name}", text, ("model",), buckets=TOKEN_BUCKETS, registry=self._registry)


class _Exposed(Collector):
    """What a scrape gets: without the times of creation, which would add a line to every counter."""

    def __init__(self, registry: Collector, *, vllm_names: bool) -> None:
        self._registry = registry
        self._vllm_names = vllm_names

    def collect(self) -> Iterator[Metric]:
        families = list(self._registry.collect())
        for family in families:
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        yield from families
        if self._vllm_names:
            yield from vllm_families(families)
