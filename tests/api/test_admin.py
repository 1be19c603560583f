"""/admin over HTTP, in front of a real registry with fake workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from emlxd.errors import ModelFormatError
from tests.api.test_errors import error_of
from tests.daemon_of_fakes import FakeDaemon, fake_daemon

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def http_of(daemon: FakeDaemon) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=daemon.url, timeout=20, verify=False) as http:
        yield http


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[FakeDaemon]:
    async with fake_daemon(tmp_path / "config.yaml", {"a": {}, "b": {"load": "on_demand"}}) as daemon:
        yield daemon


@pytest.fixture
async def http(daemon: FakeDaemon) -> AsyncIterator[httpx.AsyncClient]:
    async with http_of(daemon) as http:
        yield http


async def test_status(http: httpx.AsyncClient) -> None:
    status = (await http.get("/admin/status")).json()
    assert [(model["name"], model["state"]) for model in status["models"]] == [
        ("a", "loaded"),
        ("b", "unloaded"),
    ]
    assert (status["ready"], status["draining"], status["last_reload"]) == (True, False, None)


async def test_status_counts_what_runs(daemon: FakeDaemon, http: httpx.AsyncClient) -> None:
    resident = daemon.registry.find("a").usable
    assert resident is not None
    worker: Any = resident.worker
    worker.gate.clear()
    asking = asyncio.create_task(http.post("/v1/chat/completions", json={"model": "a", **CHAT}))
    await worker.busy.wait()
    model = (await http.get("/admin/status")).json()["models"][0]
    assert (model["running"], model["waiting"], model["slots"], model["tokens"]) == (1, 0, 4, 6)
    worker.gate.set()
    assert (await asking).status_code == 200


async def test_reload(daemon: FakeDaemon, http: httpx.AsyncClient) -> None:
    daemon.write({"a": {}, "c": {}})
    preview = (await http.post("/admin/reload", params={"dry_run": "true"})).json()
    assert (preview["dry_run"], preview["plan"]["add"], preview["plan"]["drop"]) == (True, ["c"], ["b"])
    assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["a", "b"]
    done = (await http.post("/admin/reload")).json()
    assert (done["dry_run"], done["plan"]) == (False, preview["plan"])
    assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["a", "c"]


async def test_a_refused_reload_says_why(daemon: FakeDaemon, http: httpx.AsyncClient) -> None:
    daemon.path.write_text("models: [{name: a}]\n")
    error = error_of(await http.post("/admin/reload"), 400)
    assert "source: the key is missing" in error["message"]
    assert (await http.get("/ready")).status_code == 200


@pytest.mark.parametrize("value", ["yes", "1", ""])
async def test_a_dry_run_is_true_or_false(http: httpx.AsyncClient, value: str) -> None:
    error = error_of(await http.post("/admin/reload", params={"dry_run": value}), 400)
    assert error["param"] == "dry_run"


async def test_load_and_unload(daemon: FakeDaemon, http: httpx.AsyncClient) -> None:
    assert (await http.post("/admin/models/b/load")).json() == {"model": "b", "state": "loaded"}
    assert daemon.house.in_memory == ["a", "b"]
    assert (await http.post("/admin/models/a/unload")).json() == {"model": "a", "state": "unloaded"}
    assert daemon.house.in_memory == ["b"]
    assert (await http.get("/ready")).status_code == 200
    assert (await http.post("/v1/chat/completions", json={"model": "a", **CHAT})).status_code == 200
    error_of(await http.post("/admin/models/none/load"), 404)
    error_of(await http.post("/admin/models/none/unload"), 404)


async def test_a_load_that_fails_says_why(daemon: FakeDaemon, http: httpx.AsyncClient) -> None:
    daemon.house.failures["b"] = ModelFormatError("b.gguf: is truncated")
    assert "truncated" in error_of(await http.post("/admin/models/b/load"), 503)["message"]


async def test_keys_and_limits_change_in_place(daemon: FakeDaemon, http: httpx.AsyncClient) -> None:
    daemon.write({"a": {}}, server={"api_keys": ["k-1"], "max_body_bytes": 1024})
    assert (await http.post("/admin/reload")).status_code == 200
    error_of(await http.get("/admin/status"), 401)
    key = {"Authorization": "Bearer k-1"}
    assert (await http.get("/admin/status", headers=key)).status_code == 200
    large = {"model": "a", "messages": [{"role": "user", "content": "x" * 2000}]}
    error_of(await http.post("/v1/chat/completions", json=large, headers=key), 413)
    assert daemon.house.starts == ["a"]
