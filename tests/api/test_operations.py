"""/v1/models, /health, /ready and /metrics."""

from __future__ import annotations

from typing import Any

import httpx
import openai
from openai.types import Model
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from emlxd.api.app import create_app
from emlxd.config import MetricsSettings, ServerSettings, Settings
from emlxd.metrics import Metrics
from tests.api.conftest import Server
from tests.api.strict import assert_known_fields
from tests.api.test_errors import error_of
from tests.fakes import FakeRegistry

HELLO: list[Any] = [{"role": "user", "content": "hi"}]


async def test_models(client: openai.AsyncOpenAI) -> None:
    listed = await client.models.list()
    assert [model.id for model in listed.data] == ["org/fake-1b", "fake"]
    for model in listed.data:
        assert_known_fields(model)
        Model.model_validate(model.model_dump(), strict=True)
        assert await client.models.retrieve(model.id) == model


async def test_a_slash_in_an_id_may_be_quoted_or_not(http: httpx.AsyncClient) -> None:
    for path in ["/v1/models/org/fake-1b", "/v1/models/org%2Ffake-1b"]:
        assert (await http.get(path)).json()["id"] == "org/fake-1b"
    assert error_of(await http.get("/v1/models/org"), 404)["code"] == "model_not_found"


async def test_health_and_readiness(server: Server, http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).json() == {"status": "ok"}
    ready = await http.get("/ready")
    assert (ready.status_code, ready.json()["models"]) == (200, {"org/fake-1b": "loaded"})
    server.registry.ready = False
    refused = await http.get("/ready")
    assert "org/fake-1b is loading" in error_of(refused, 503)["message"]
    assert refused.headers["retry-after"] == "1"
    assert (await http.get("/health")).status_code == 200


async def test_metrics_of_requests(
    server: Server, client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=2)
    async for _ in await client.completions.create(model="fake", prompt="abc", stream=True):
        pass
    await http.get("/no/such/path")
    await http.request("BREW", "/health")

    model = "org/fake-1b"
    chat = {"model": model, "endpoint": "/v1/chat/completions"}
    text = {"model": model, "endpoint": "/v1/completions"}
    assert server.metric("emlxd_requests_total", **chat, finish_reason="length") == 1
    assert server.metric("emlxd_requests_total", **text, finish_reason="stop") == 1
    assert server.metric("emlxd_prompt_tokens_total", model=model) == len("user:hi\n") + 3
    assert server.metric("emlxd_generation_tokens_total", model=model) == 2 + 6
    assert server.metric("emlxd_time_to_first_token_seconds_count", model=model) == 2
    assert server.metric("emlxd_request_duration_seconds_count", model=model) == 2
    unmatched = {"route": "unmatched", "status": "404"}
    assert server.metric("emlxd_http_requests_total", **unmatched, method="GET") == 1
    strange = {"route": "unmatched", "method": "other", "status": "405"}
    assert server.metric("emlxd_http_requests_total", **strange) == 1


async def test_metrics_formats(http: httpx.AsyncClient) -> None:
    plain = await http.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    families: dict[str, Any] = {family.name: family for family in parse_text(plain.text)}
    assert families["emlxd_build_info"].samples[0].labels.keys() == {"version", "mlx_version", "device"}
    assert all(family.documentation for family in families.values())
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    openmetrics = await http.get("/metrics", headers=accept)
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert list(parse_openmetrics(openmetrics.text))  # type: ignore[no-untyped-call]


async def test_metrics_can_be_switched_off() -> None:
    settings = Settings(server=ServerSettings(), metrics=MetricsSettings(enabled=False))
    app = create_app(FakeRegistry(), settings, Metrics(device="fake"))
    response = await app.test_client().get("/metrics")
    assert response.status_code == 404


def test_two_servers_count_apart() -> None:
    one, two = Metrics(device="fake"), Metrics(device="fake")
    one.http_request("/health", "GET", 200, 0.1)
    assert b"emlxd_http_requests_total{" in one.exposition("")[0]
    assert b"emlxd_http_requests_total{" not in two.exposition("")[0]
