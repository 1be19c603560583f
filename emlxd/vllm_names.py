"""The same readings under the names that vLLM gives them, for dashboards made for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily

NAMES: Final = MappingProxyType(
    {
        "emlxd_requests_running": "vllm:num_requests_running",
        "emlxd_requests_waiting": "vllm:num_requests_waiting",
        "emlxd_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
        "emlxd_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
        "emlxd_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
        "emlxd_request_duration_seconds": "vllm:e2e_request_latency_seconds",
        "emlxd_request_queue_seconds": "vllm:request_queue_time_seconds",
        "emlxd_prompt_tokens": "vllm:prompt_tokens",
        "emlxd_generation_tokens": "vllm:generation_tokens",
        "emlxd_prefix_cache_query_tokens": "vllm:prefix_cache_queries",
        "emlxd_prefix_cache_hit_tokens": "vllm:prefix_cache_hits",
    }
)
# vLLM counts a tool call as an answer that stopped, and no errors here.
FINISHED_REASONS: Final = MappingProxyType(
    {"stop": "stop", "tool_calls": "stop", "length": "length", "abort": "abort"}
)


def vllm_families(families: Iterable[Metric]) -> Iterator[Metric]:
    """What of ``families`` vLLM has too, with the label ``model_name`` for ``model``."""
    for family in families:
        if family.name in NAMES:
            yield _renamed(family, NAMES[family.name])
        elif family.name == "emlxd_requests":
            yield _successes(family)


def _renamed(family: Metric, name: str) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        labels = {
            "model_name" if label == "model" else label: value for label, value in sample.labels.items()
        }
        renamed.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
    return renamed


def _successes(family: Metric) -> Metric:
    counts: Counter[tuple[str, str]] = Counter()
    for sample in family.samples:
        if reason := FINISHED_REASONS.get(sample.labels["finish_reason"]):
            counts[sample.labels["model"], reason] += int(sample.value)
    successes = CounterMetricFamily(
        "vllm:request_success", family.documentation, labels=["model_name", "finished_reason"]
    )
    for labels, count in counts.items():
        successes.add_metric(labels, count)
    return successes
