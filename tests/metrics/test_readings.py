"""Every value of a scrape against what happened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from emlxd.graph.batch import BLOCK_TOKENS
from tests.metrics.house import MAX_CONTEXT, House, house
from tests.residents import model, settle

M = '{model="m"}'


async def until(house: House, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    async with asyncio.timeout(20):
        while not condition(values := await house.scrape()):
            await asyncio.sleep(0.001)
    return values


def unfinished(values: dict[str, float]) -> float:
    return values[f"emlxd_requests_running{M}"] + values[f"emlxd_requests_waiting{M}"]


async def test_counts_of_finished_requests() -> None:
    async with house() as daemon:
        prompt = "ab" * BLOCK_TOKENS + "c"
        for _ in range(2):
            assert (await daemon.complete(prompt=prompt, max_tokens=5)).status_code == 200
        await daemon.complete(prompt="a", max_tokens=1)
        values = await until(daemon, lambda values: values[f"emlxd_requests_running{M}"] == 0)
    length = 'emlxd_requests_total{endpoint="/v1/completions",finish_reason="length",model="m"}'
    assert values[length] == 3
    asked = 2 * len(prompt) + 1
    assert values[f"emlxd_prompt_tokens_total{M}"] == asked
    assert values[f"emlxd_prefix_cache_query_tokens_total{M}"] == asked
    assert values[f"emlxd_prefix_cache_hit_tokens_total{M}"] == 2 * BLOCK_TOKENS
    assert values[f"emlxd_generation_tokens_total{M}"] == 5 + 5 + 1
    assert values[f"emlxd_inter_token_latency_seconds_count{M}"] == 4 + 4
    assert values[f"emlxd_step_batch_size_count{M}"] == values[f"emlxd_step_batch_size_sum{M}"] == 4 + 4
    assert values[f"emlxd_step_seconds_count{M}"] > 8
    assert values[f"emlxd_compiled_traces_total{M}"] == 1
    for name in (
        "time_to_first_token",
        "request_duration",
        "request_queue",
        "request_prefill",
        "request_decode",
    ):
        assert values[f"emlxd_{name}_seconds_count{M}"] == 3, name
        assert 0 <= values[f"emlxd_{name}_seconds_sum{M}"] < 60, name
    for name in ("prompt", "generation"):
        assert values[f"emlxd_request_{name}_tokens_sum{M}"] == values[f"emlxd_{name}_tokens_total{M}"]


async def test_gauges_of_running_requests() -> None:
    async with house() as daemon:
        daemon.runners["m"].free.clear()
        running = [asyncio.create_task(daemon.complete(max_tokens=4)) for _ in range(3)]
        values = await until(daemon, lambda values: values[f"emlxd_requests_running{M}"] > 0)
        assert values[f"emlxd_requests_running{M}"] <= values[f"emlxd_slots{M}"] == 2
        await until(daemon, lambda values: unfinished(values) == 3)
        # The prompts are written, and the first decode step is held: it writes one more each.
        used = await until(daemon, lambda values: values[f"emlxd_kv_cache_usage_ratio{M}"] > 0)
        assert used[f"emlxd_kv_cache_usage_ratio{M}"] <= 2 * (3 + 1) / (2 * MAX_CONTEXT)
        old = await until(daemon, lambda values: values[f"emlxd_worker_heartbeat_age_seconds{M}"] > 0)
        assert unfinished(old) == 3
        daemon.runners["m"].free.set()
        await asyncio.gather(*running)
        values = await until(daemon, lambda values: values[f"emlxd_requests_running{M}"] == 0)
    for name in ("requests_waiting", "kv_cache_usage_ratio", "worker_heartbeat_age_seconds"):
        assert values[f"emlxd_{name}{M}"] == 0, name


async def test_models_and_memory() -> None:
    async with house(model("m"), model("later", load="on_demand")) as daemon:
        values = await daemon.scrape()
    assert values[f"emlxd_model_loaded{M}"] == 1
    assert values['emlxd_model_loaded{model="later"}'] == 0
    assert 0 < values[f"emlxd_model_load_seconds{M}"] < 60
    assert 'emlxd_model_load_seconds{model="later"}' not in values
    loads = {("m", "success"): 1, ("m", "failure"): 0, ("later", "success"): 0, ("later", "failure"): 0}
    for (name, result), count in loads.items():
        assert values[f'emlxd_model_loads_total{{model="{name}",result="{result}"}}'] == count
    for part, size in {"weights": 1000, "kv_cache": 200, "prefix_cache": 30}.items():
        assert values[f'emlxd_model_memory_bytes{{model="m",part="{part}"}}'] == size
    for kind, size in {"active": 11, "peak": 22, "cache": 33}.items():
        assert values[f'emlxd_mlx_memory_bytes{{kind="{kind}"}}'] == size


async def test_counts_outlive_the_worker() -> None:
    """What is counted never goes back while the daemon runs, and an unloaded model shows no gauges."""
    async with house() as daemon:
        await daemon.complete(max_tokens=5)
        (entry,) = daemon.registry.models
        assert entry.resident is not None
        gone = entry.resident.gone
        daemon.registry.unload(entry)
        await gone.wait()
        values = await daemon.scrape()
        assert values[f"emlxd_step_batch_size_sum{M}"] == 4
        assert values[f"emlxd_model_loaded{M}"] == 0
        assert f"emlxd_slots{M}" not in values
        assert values['emlxd_model_unloads_total{model="m",reason="request"}'] == 1
        await daemon.complete(max_tokens=3)
        values = await until(daemon, lambda values: values[f"emlxd_requests_running{M}"] == 0)
    assert values[f"emlxd_step_batch_size_sum{M}"] == 4 + 2
    assert values['emlxd_model_loads_total{model="m",result="success"}'] == 2


async def test_a_client_that_leaves_is_an_abort() -> None:
    async with house() as daemon:
        daemon.runners["m"].free.clear()
        request = asyncio.create_task(daemon.complete(max_tokens=900))
        await until(daemon, lambda values: values[f"emlxd_requests_running{M}"] == 1)
        request.cancel()
        abort = 'emlxd_requests_total{endpoint="/v1/completions",finish_reason="abort",model="m"}'
        await until(daemon, lambda values: values.get(abort) == 1)
        daemon.runners["m"].free.set()
        await until(daemon, lambda values: values[f"emlxd_requests_running{M}"] == 0)


async def test_labels_do_not_grow_with_what_clients_send() -> None:
    async with house() as daemon:
        before = await daemon.scrape()
        for number in range(20):
            assert (await daemon.complete(f"unknown-{number}")).status_code == 404
            assert (await daemon.http.get(f"/no/such/path/{number}")).status_code == 404
            await daemon.http.request(f"BREW{number}", "/health")
        after = await daemon.scrape()
    assert not any("unknown" in name or "BREW" in name or "such" in name for name in after)
    series = {name for name in after.keys() - before.keys() if name.startswith("emlxd_http_requests_total")}
    assert len(series) <= 4


async def test_vllm_names() -> None:
    async with house() as daemon:
        await daemon.complete(max_tokens=5)
        assert not any(name.startswith("vllm:") for name in await daemon.scrape())
        await settle()
    async with house(metrics={"vllm_names": True}) as daemon:
        await daemon.complete(max_tokens=5)
        values = await until(daemon, lambda values: values[f"emlxd_requests_running{M}"] == 0)
    named = '{model_name="m"}'
    for ours, theirs in {
        "requests_running": "num_requests_running",
        "requests_waiting": "num_requests_waiting",
        "kv_cache_usage_ratio": "kv_cache_usage_perc",
        "time_to_first_token_seconds_count": "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_sum": "inter_token_latency_seconds_sum",
        "request_duration_seconds_count": "e2e_request_latency_seconds_count",
        "request_queue_seconds_count": "request_queue_time_seconds_count",
        "prompt_tokens_total": "prompt_tokens_total",
        "generation_tokens_total": "generation_tokens_total",
        "prefix_cache_query_tokens_total": "prefix_cache_queries_total",
        "prefix_cache_hit_tokens_total": "prefix_cache_hits_total",
    }.items():
        assert values[f"vllm:{theirs}{named}"] == values[f"emlxd_{ours}{M}"], theirs
    assert values['vllm:request_success_total{finished_reason="length",model_name="m"}'] == 1
    assert values['vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"}'] == 1
