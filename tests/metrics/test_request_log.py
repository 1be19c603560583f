"""One line for each request, at its end, and nothing in any line that is not for other eyes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import structlog

from emlxd import log
from emlxd.config import LogSettings
from tests.api.conftest import start_server
from tests.fakes import FakeEmbedder, FakeRegistry
from tests.metrics.house import House, house
from tests.metrics.test_readings import M, until

SECRET = "thequickbrownfoxthatnobodyelseshouldsee"
KEY = "sk-never-to-be-seen"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@asynccontextmanager
async def logging_house(**settings: Any) -> AsyncIterator[House]:
    log.configure(LogSettings(format="json", level="debug"))
    async with house(**settings) as daemon:
        yield daemon


def requests(text: str, path: str = "/v1/completions") -> list[dict[str, Any]]:
    lines = map(json.loads, text.splitlines())
    return [line for line in lines if line["message"] == "request" and line["path"] == path]


async def test_a_line_says_what_the_request_took(capsys: pytest.CaptureFixture[str]) -> None:
    async with logging_house() as daemon:
        for _ in range(2):
            answer = await daemon.complete(prompt="ab" * 40, max_tokens=5, n=2)
    first, second = requests(capsys.readouterr().err)
    assert first["request_id"].startswith("req_") and first["request_id"] != second["request_id"]
    assert second["request_id"] == answer.headers["x-request-id"]
    assert 0 < second.pop("first_token_seconds") <= second.pop("seconds")
    second = {name: second[name] for name in second.keys() - {"request_id", "timestamp"}}
    assert second == {
        "message": "request",
        "level": "info",
        "logger": "emlxd.http",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "client": "127.0.0.1",
        "model": "m",
        "prompt_tokens": 80,
        "completion_tokens": 10,
        "cached_tokens": 64,
        "finish_reason": "length",
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves(capsys: pytest.CaptureFixture[str], stream: bool) -> None:
    async with logging_house() as daemon:
        runner = daemon.runners["m"]
        runner.hold_after = 5
        request = asyncio.create_task(daemon.complete(max_tokens=900, stream=stream))
        # The first token is that of the prompt. When the sixth step is dispatched, the fourth was read, but
        # its token, the fifth, is looked at thereafter.
        await until(daemon, lambda values: values[f"emlxd_inter_token_latency_seconds_count{M}"] == 3)
        request.cancel()
        abort = 'emlxd_requests_total{endpoint="/v1/completions",finish_reason="abort",model="m"}'
        values = await until(daemon, lambda values: values.get(abort) == 1)
        runner.free.set()
        await until(daemon, lambda values: values[f"emlxd_requests_running{M}"] == 0)
    (line,) = requests(capsys.readouterr().err)
    assert (line["finish_reason"], line["model"]) == ("abort", "m")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (3, 4)
    assert values[f"emlxd_prompt_tokens_total{M}"] == 3
    assert values[f"emlxd_generation_tokens_total{M}"] == 4
    assert f"emlxd_request_generation_tokens_count{M}" not in values


async def test_a_request_that_fails_counts_what_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    async with logging_house() as daemon:
        runner = daemon.runners["m"]
        runner.hold_after = 5
        request = asyncio.create_task(daemon.complete(max_tokens=900))
        await until(daemon, lambda values: values[f"emlxd_inter_token_latency_seconds_count{M}"] == 3)
        runner.fail_next = RuntimeError("device lost")
        runner.free.set()
        assert (await request).status_code == 500
    (line,) = requests(capsys.readouterr().err)
    assert (line["finish_reason"], line["prompt_tokens"], line["completion_tokens"]) == ("error", 3, 5)


async def test_a_line_for_a_request_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    async with logging_house() as daemon:
        await daemon.complete("unknown")
    (line,) = requests(capsys.readouterr().err)
    assert line["status"] == 404
    assert "model" not in line


@pytest.mark.parametrize(
    ("body", "error", "field"),
    [
        ({"model": SECRET}, "model_not_found", "model"),
        ({"max_tokens": SECRET}, "invalid_type", "max_tokens"),
        ({"logit_bias": {SECRET: 1}}, "invalid_value", "logit_bias"),
        ({"prompt": "a" * 5000}, "context_length_exceeded", "prompt"),
    ],
)
async def test_a_line_says_why_a_request_was_refused(
    capsys: pytest.CaptureFixture[str], body: dict[str, Any], error: str, field: str
) -> None:
    """By code and by the body's field, which are ours; the message may quote the client."""
    async with logging_house() as daemon:
        await daemon.http.post("/v1/completions", json={"model": "m", "prompt": "abc"} | body)
    text = capsys.readouterr().err
    (line,) = requests(text)
    assert (line["error"], line["param"]) == (error, field)
    assert SECRET not in text


@pytest.mark.parametrize("sent", ["abc-123", "a" * 128, "00-4bf92f3577b34da6a3ce929d0e0e4736:1"])
async def test_the_clients_own_id_is_taken(capsys: pytest.CaptureFixture[str], sent: str) -> None:
    async with logging_house() as daemon:
        daemon.http.headers["X-Request-Id"] = sent
        answers = await asyncio.gather(daemon.complete(max_tokens=3), daemon.complete(max_tokens=3))
        answers.append(await daemon.complete("unknown"))
        daemon.runners["m"].fail_next = RuntimeError("device lost")
        answers.append(await daemon.complete(max_tokens=3))
    assert [answer.status_code for answer in answers] == [200, 200, 404, 500]
    assert {answer.headers["x-request-id"] for answer in answers} == {sent}
    lines = capsys.readouterr().err
    assert {line["request_id"] for line in requests(lines)} == {sent}
    (failed,) = (line for line in map(json.loads, lines.splitlines()) if line["message"] == "step failed")
    assert [id.startswith(f"{sent}.req_") for id in failed["requests"]] == [True]


@pytest.mark.parametrize("sent", ["", "a" * 129, "two words", 'a"b', "é"])
async def test_an_id_that_is_not_fit_is_passed_over(sent: str) -> None:
    async with logging_house() as daemon:
        headers = [(b"x-request-id", sent.encode())]
        answer = await daemon.http.get("/health", headers=headers)
    assert answer.headers["x-request-id"].startswith("req_")


async def some_of_everything(**settings: Any) -> None:
    async with logging_house(**settings) as daemon:
        daemon.http.headers["Authorization"] = f"Bearer {KEY}"
        message = [{"role": "user", "content": SECRET}]
        for path, body in (
            ("/v1/chat/completions", {"messages": message, "max_tokens": 3}),
            ("/v1/chat/completions", {"messages": message, "max_tokens": 3, "stream": True}),
            ("/v1/completions", {"prompt": SECRET, "max_tokens": 3}),
            ("/v1/completions", {"prompt": SECRET, "max_tokens": SECRET}),
            ("/v1/completions", {"prompt": SECRET * 100}),
            ("/v1/messages", {"messages": message, "max_tokens": 3}),
        ):
            await daemon.http.post(path, json={"model": "m"} | body)
        daemon.runners["m"].fail_next = RuntimeError("device lost")
        await daemon.complete(prompt=SECRET)


async def test_no_prompt_and_no_key_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    await some_of_everything()
    text = capsys.readouterr().err
    assert len(text.splitlines()) > 7
    assert SECRET not in text
    assert KEY not in text


async def test_prompts_are_logged_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    await some_of_everything(log={"prompts": True})
    text = capsys.readouterr().err
    lines = [line for line in map(json.loads, text.splitlines()) if line["message"] == "prompt"]
    assert len(lines) >= 4
    assert all(line["text"] == SECRET and line["model"] == "m" and line["request_id"] for line in lines)
    assert KEY not in text


async def test_an_embedding_counts_its_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(LogSettings(format="json"))
    async with (
        start_server(FakeRegistry(FakeEmbedder())) as server,
        httpx.AsyncClient(base_url=server.url, verify=False) as http,
    ):
        await http.post("/v1/embeddings", json={"model": "fake", "input": ["ab", "c"]})
        assert server.metric("emlxd_prompt_tokens_total", model="org/fake-1b") == 3
    (line,) = requests(capsys.readouterr().err, "/v1/embeddings")
    assert (line["model"], line["prompt_tokens"], line["finish_reason"]) == ("org/fake-1b", 3, None)
