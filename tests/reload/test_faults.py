"""Whatever breaks, the daemon ends up in the state that the documentation promises, and goes on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from emlxd.errors import ModelFormatError, ServerFault, SourceError
from emlxd.registry import LAST_RETRY
from tests.api.wire import connect
from tests.daemon_of_fakes import FakeDaemon, HouseWorker, fake_daemon
from tests.residents import settle

MODELS: dict[str, Any] = {"a": {}, "b": {"load": "on_demand"}}
CHAT = "/v1/chat/completions"


def body(name: str, **more: Any) -> dict[str, Any]:
    return {"model": name, "messages": [{"role": "user", "content": "hi"}]} | more


def worker_of(daemon: FakeDaemon, name: str) -> HouseWorker:
    resident = daemon.registry.find(name).usable
    assert resident is not None
    return cast(HouseWorker, resident.worker)


async def worker_exception(daemon: FakeDaemon, http: httpx.AsyncClient) -> None:
    """The request fails, the model goes on."""
    worker = worker_of(daemon, "a")
    worker.failure = ServerFault("The model failed while it computed the answer.")
    failed = await http.post(CHAT, json=body("a"))
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
    worker.failure, worker.fail_after = ServerFault("It failed."), 2
    stream = await http.post(CHAT, json=body("a", stream=True))
    assert (stream.status_code, "It failed." in stream.text, "[DONE]" in stream.text) == (200, True, False)
    worker.failure = None
    assert worker_of(daemon, "a") is worker


async def dead_worker(daemon: FakeDaemon, http: httpx.AsyncClient) -> None:
    """/ready is 503 until another worker is there."""
    worker = worker_of(daemon, "a")
    worker.alive = False
    assert (await http.get("/ready")).status_code == 503
    daemon.registry.tick()
    assert "ended unexpectedly" in (await http.post(CHAT, json=body("a"))).json()["error"]["message"]
    daemon.house.now += LAST_RETRY
    daemon.registry.tick()
    await settle()
    assert worker_of(daemon, "a") is not worker


async def load_failure(daemon: FakeDaemon, http: httpx.AsyncClient) -> None:
    """Who asks gets the reason; the other models do not notice."""
    daemon.registry.unload(daemon.registry.find("b"))
    daemon.house.failures["b"] = ModelFormatError("b.gguf: is truncated")
    for answer in await asyncio.gather(*(http.post(CHAT, json=body("b")) for _ in range(3))):
        assert (answer.status_code, "truncated" in answer.text) == (503, True)
        assert int(answer.headers["retry-after"]) >= 1
    assert (await http.get("/ready")).status_code == 200
    daemon.house.failures.clear()
    daemon.house.now += LAST_RETRY
    assert (await http.post(CHAT, json=body("b"))).status_code == 200


async def full_disk(daemon: FakeDaemon, http: httpx.AsyncClient) -> None:
    """A model that cannot be stored is refused with the reload that names it."""
    daemon.write(MODELS | {"c": {}})
    daemon.house.unprepared["c"] = SourceError("c: no space left on device")
    refused = await http.post("/admin/reload")
    assert (refused.status_code, "no space left" in refused.text) == (400, True)
    assert (await http.post(CHAT, json=body("c"))).status_code == 404


async def garbage(daemon: FakeDaemon, http: httpx.AsyncClient) -> None:
    """The old configuration stays."""
    daemon.path.write_bytes(random.Random(1).randbytes(300))
    assert (await http.post("/admin/reload")).status_code == 400
    status = (await http.get("/admin/status")).json()
    assert status["last_reload"]["error"]
    assert [model["name"] for model in status["models"]] == list(MODELS)


async def slow_client(daemon: FakeDaemon, http: httpx.AsyncClient) -> None:
    """A client that reads nothing and leaves frees its place."""
    worker = worker_of(daemon, "a")
    worker.gate.clear()
    async with connect(int(daemon.url.rsplit(":", 1)[1])) as wire:
        await wire.post(CHAT, body("a", stream=True))
        await worker.busy.wait()
    await worker.idle.wait()
    worker.gate.set()
    resident = daemon.registry.find("a").usable
    while resident is not None and resident.leases:
        await asyncio.sleep(0)


async def no_room(daemon: FakeDaemon, http: httpx.AsyncClient) -> None:
    """503 with numbers, and nothing is unloaded for it."""
    daemon.registry.unload(daemon.registry.find("b"))
    await settle()
    daemon.house.residents.budget = 150
    async with daemon.registry.lease("a"):
        refused = await http.post(CHAT, json=body("b"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "insufficient_memory")
    assert "needs 100 B of memory; the budget is 150 B" in refused.text
    daemon.house.residents.budget = 1000


FAULTS: tuple[Callable[[FakeDaemon, httpx.AsyncClient], Awaitable[None]], ...] = (
    worker_exception,
    dead_worker,
    load_failure,
    full_disk,
    garbage,
    slow_client,
    no_room,
)


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_faults_one_after_the_other(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    async with (
        fake_daemon(tmp_path / "config.yaml", MODELS) as daemon,
        httpx.AsyncClient(base_url=daemon.url, timeout=30, verify=False) as http,
    ):
        for fault in [*FAULTS, *choose.choices(FAULTS, k=25 - len(FAULTS))]:
            await fault(daemon, http)
            daemon.write(MODELS)
            daemon.house.unprepared.clear()
            assert (await http.post("/admin/reload")).status_code == 200, fault.__name__
            assert (await http.get("/ready")).status_code == 200, fault.__name__
            for name in MODELS:
                answer = await http.post(CHAT, json=body(name))
                assert answer.status_code == 200, f"{fault.__name__}: {answer.text}"


async def test_forty_requests_at_once_load_a_model_once(tmp_path: Path) -> None:
    async with (
        fake_daemon(tmp_path / "config.yaml", MODELS) as daemon,
        httpx.AsyncClient(base_url=daemon.url, timeout=30, verify=False) as http,
    ):
        daemon.house.gate.clear()
        asking = [asyncio.create_task(http.post(CHAT, json=body("b"))) for _ in range(40)]
        while daemon.registry.find("b").state != "loading":
            await asyncio.sleep(0)
        daemon.house.gate.set()
        answers = await asyncio.gather(*asking)
        assert {answer.status_code for answer in answers} == {200}
        assert daemon.house.starts == ["a", "b"]


async def test_a_stop_under_load_cuts_no_stream(tmp_path: Path) -> None:
    """Sixteen streams run when the signal comes; the drain limit is far away."""
    async with (
        fake_daemon(tmp_path / "config.yaml", MODELS, drain_timeout=60) as daemon,
        httpx.AsyncClient(base_url=daemon.url, timeout=30, verify=False) as http,
    ):
        worker = worker_of(daemon, "a")
        worker.gate.clear()
        streams = [asyncio.create_task(http.post(CHAT, json=body("a", stream=True))) for _ in range(16)]
        while len(worker.submitted) < 16:
            await asyncio.sleep(0)
        daemon.stop.set()
        await settle()
        worker.gate.set()
        for answer in await asyncio.gather(*streams):
            assert answer.text.endswith("data: [DONE]\n\n")
            assert "error" not in answer.text
