"""Every instrument, none of them shared: two servers in one process count apart.

Labels have few values by construction: model names come from the configuration, routes from the
URL map, and methods from a fixed list.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Literal, Protocol

from emlxd.core import Timing, Usage
from emlxd.exposition import asked_format, expose
from emlxd.instruments import AnyFamily, Family, LabelledHistogram, Labels
from emlxd.version import package_version
from emlxd.vllm_names import vllm_families

FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKEN_BUCKETS = tuple(2**power for power in range(18))
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Collector(Protocol):
    """Has readings that are taken at each scrape."""

    def collect(self) -> Iterator[AnyFamily]: ...


class Metrics:
    """What emlxd counts and times, on the event loop. ``device`` is what the models run on."""

    def __init__(self, *, device: str) -> None:
        self.device = device
        self._numbers: list[Family] = []
        self._histograms: list[LabelledHistogram] = []
        self._collectors: list[Collector] = []
        build = self._gauge("build_info", "What runs here; always 1.", "version", "mlx_version", "device")
        build[package_version(), package_version("mlx"), device] = 1

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

        http = ("route", "method", "status")
        self._http_requests = self._counter("http_requests", "HTTP requests that ended.", *http)
        self._http_duration = self._histogram(
            "http_request_duration_seconds",
            "From an HTTP request's headers to the last byte of its answer.",
            http,
            REQUEST_BUCKETS,
        )

        self._reloads = self._counter("config_reloads", "Reloads of the configuration.", "result")
        self._reload_ok = self._gauge("config_last_reload_successful", "1 if the last reload was, 0 if not.")
        self._reload_time = self._gauge(
            "config_last_reload_success_timestamp_seconds", "When the configuration in force was loaded."
        )
        for result in ("changed", "unchanged", "failed"):
            self._reloads[result,] = 0
        self._reload_ok[()] = 1
        self._reload_time[()] = time.time()

    def add_collector(self, collector: Collector) -> None:
        """Readings that are taken at each scrape: the gauges of engines, memory and workers."""
        self._collectors.append(collector)

    def exposition(self, accept: str, *, vllm_names: bool = False) -> tuple[bytes, str]:
        """All readings in the format that the ``Accept`` header asks for, and its content type.

        ``vllm_names`` adds those that vLLM has too, under its names.
        """
        format = asked_format(accept)
        families = list(self._collect())
        if vllm_names:
            families += vllm_families(families)
        return expose(families, format), format.content_type

    def _collect(self) -> Iterator[AnyFamily]:
        yield from self._numbers
        for histogram in self._histograms:
            yield histogram.read()
        for collector in self._collectors:
            yield from collector.collect()

    def first_token(self, model: str, seconds: float) -> None:
        self._first_token.observe(seconds, model)

    def prompt_read(self, model: str, usage: Usage) -> None:
        """A prompt was answered, once or several times."""
        self._prompt_tokens[model,] += usage.prompt_tokens
        self._request_prompt.observe(usage.prompt_tokens, model)

    def generation_finished(self, model: str, usage: Usage, timing: Timing) -> None:
        """A generation came to its own end."""
        self._generation_tokens[model,] += usage.completion_tokens
        self._request_generation.observe(usage.completion_tokens, model)
        self._queue.observe(timing.queue, model)
        self._prefill.observe(timing.prefill, model)
        self._decode.observe(timing.decode, model)

    def cut_off(self, model: str, usage: Usage) -> None:
        """Generations did not come to their end: what they took counts, how long they were does not."""
        self._prompt_tokens[model,] += usage.prompt_tokens
        self._generation_tokens[model,] += usage.completion_tokens

    def request_ended(self, model: str, endpoint: str, finish_reason: str, seconds: float) -> None:
        """``finish_reason`` is the API's, or "abort" (the client left) or "error"."""
        self._requests[model, endpoint, finish_reason] += 1
        self._duration.observe(seconds, model)

    def reloaded(self, result: str) -> None:
        """``result`` is "changed", "unchanged" or "failed"."""
        self._reloads[result,] += 1
        self._reload_ok[()] = int(result != "failed")
        if result == "changed":
            self._reload_time[()] = time.time()

    def http_request(self, route: str, method: str, status: int, seconds: float) -> None:
        labels = (route, method if method in METHODS else "other", str(status))
        self._http_requests[labels] += 1
        self._http_duration.observe(seconds, *labels)

    def _counter(self, name: str, text: str, *labels: str) -> defaultdict[Labels, float]:
        return self._number("counter", name, text, labels)

    def _gauge(self, name: str, text: str, *labels: str) -> defaultdict[Labels, float]:
        return self._number("gauge", name, text, labels)

    def _number(
        self, kind: Literal["counter", "gauge"], name: str, text: str, labels: Labels
    ) -> defaultdict[Labels, float]:
        series: defaultdict[Labels, float] = defaultdict(int)
        self._numbers.append(Family(f"emlxd_{name}", kind, text, labels, series))
        return series

    def _seconds(
        self, name: str, text: str, bounds: tuple[float, ...] = REQUEST_BUCKETS
    ) -> LabelledHistogram:
        return self._histogram(f"{name}_seconds", text, ("model",), bounds)

    def _tokens(self, name: str, text: str) -> LabelledHistogram:
        return self._histogram(name, text, ("model",), TOKEN_BUCKETS)

    def _histogram(
        self, name: str, text: str, labels: Labels, bounds: tuple[float, ...]
    ) -> LabelledHistogram:
        histogram = LabelledHistogram(f"emlxd_{name}", text, labels, bounds)
        self._histograms.append(histogram)
        return histogram
