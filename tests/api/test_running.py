"""/admin/requests: what runs now, and how to end it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.conftest import Server
from tests.api.test_errors import error_of
from tests.api.test_wire import payloads
from tests.api.wire import connect

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


async def test_nothing_runs(http: httpx.AsyncClient) -> None:
    assert (await http.get("/admin/requests")).json() == {"requests": []}


async def test_what_runs(server: Server, http: httpx.AsyncClient) -> None:
    server.worker.gate.clear()
    async with connect(server.port) as one, connect(server.port) as two:
        await one.post(CHAT, BODY | {"n": 2, "stream": True})
        _, headers = await one.head()
        await two.post("/v1/completions", {"model": "fake", "prompt": ["ab", "c"], "stream": True})
        await two.head()
        first, second = (await http.get("/admin/requests")).json()["requests"]
        assert first.pop("seconds") >= 0
        assert first == {
            "id": headers["x-request-id"],
            "model": "org/fake-1b",
            "endpoint": CHAT,
            "prompt_tokens": len("user:hi\n"),
            "answers": 2,
            "unread_bytes": 0,
        }
        assert (second["endpoint"], second["prompt_tokens"], second["answers"]) == ("/v1/completions", 3, 2)
        server.worker.gate.set()
        await one.body()
        await two.body()
    assert (await http.get("/admin/requests")).json() == {"requests": []}


@pytest.mark.parametrize("sent", [[], ["X-Request-Id: my-own"]])
@pytest.mark.parametrize("by", ["header", "answer"])
async def test_abort(server: Server, http: httpx.AsyncClient, by: str, sent: list[str]) -> None:
    server.worker.gate.clear()
    server.worker.free = 2
    async with connect(server.port) as wire:
        await wire.post(CHAT, BODY | {"stream": True}, *sent)
        _, headers = await wire.head()
        (role,) = payloads(await wire.chunk())
        id = headers["x-request-id"] if by == "header" else role["id"]
        answer = await http.post(f"/admin/requests/{id}/abort")
        assert answer.json() == {"id": id, "aborted": True}
        *_, error = payloads(await wire.body())
        assert error["error"]["code"] == "request_aborted"
    await server.worker.idle.wait()
    assert len(server.worker.cancelled) == 1


@pytest.mark.parametrize("id", ["req_" + "0" * 32, "0", "-"])
async def test_abort_of_what_does_not_run(server: Server, http: httpx.AsyncClient, id: str) -> None:
    server.worker.gate.clear()
    async with connect(server.port) as wire:
        await wire.post(CHAT, BODY | {"stream": True})
        await wire.head()
        assert error_of(await http.post(f"/admin/requests/{id}/abort"), 404)["param"] == "id"
        (running,) = (await http.get("/admin/requests")).json()["requests"]
        assert error_of(await http.post(f"/admin/requests/{running['id'][-8:]}/abort"), 404)
        assert len((await http.get("/admin/requests")).json()["requests"]) == 1
