"""The same readings under the names that vLLM gives them, for dashboards made for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from emlxd.instruments import AnyFamily, Family, Labels

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
# vLLM counts tool calls as answers that stopped, and does not count errors.
FINISHED_REASONS: Final = MappingProxyType(
    {"stop": "stop", "tool_calls": "stop", "length": "length", "abort": "abort"}
)


def vllm_families(families: Iterable[AnyFamily]) -> Iterator[AnyFamily]:
    """What of ``families`` vLLM has too, with the label ``model_name`` for ``model``."""
    for family in families:
        if family.name in NAMES:
            yield replace(family, name=NAMES[family.name], labels=("model_name",))
        elif isinstance(family, Family) and family.name == "emlxd_requests":
            yield _successes(family)


def _successes(family: Family) -> Family:
    counts: Counter[Labels] = Counter()
    for (model, _, reason), count in family.series.items():
        if reason in FINISHED_REASONS:
            counts[model, FINISHED_REASONS[reason]] += int(count)
    labels = ("model_name", "finished_reason")
    return replace(family, name="vllm:request_success", labels=labels, series=counts)
