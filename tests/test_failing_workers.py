"""Workers that die or get stuck."""

from __future__ import annotations

import asyncio

import pytest

from emlxd.errors import ServerFault, Unavailable
from emlxd.registry import Registry
from tests.residents import House, model, settle, use


async def with_a_dead_worker() -> tuple[House, Registry]:
    """A registry whose one model has been loaded, and its worker has died."""
    house = House()
    registry = house.registry(model("a"))
    await registry.load()
    async with registry.lease("a") as worker:
        worker.alive = False  # type: ignore[misc]
    return house, registry


async def test_a_dead_worker_is_replaced() -> None:
    house, registry = await with_a_dead_worker()
    assert not registry.ready
    registry.tick()
    assert not registry.ready
    with pytest.raises(Unavailable, match="ended unexpectedly"):
        await use(registry, "a")
    house.now += 1.0
    registry.tick()
    await settle()
    assert registry.ready
    assert house.starts == ["a", "a"]


async def test_a_stuck_worker_is_seen() -> None:
    house = House()
    registry = house.registry(model("a"), stall_timeout=60)
    await registry.load()
    (resident,) = house.residents
    resident.worker.heartbeat_age = 60.0  # type: ignore[misc]
    assert registry.ready
    resident.worker.heartbeat_age = 60.1  # type: ignore[misc]
    assert (registry.ready, registry.stuck) == (False, ["a"])


async def test_watching_ends_when_a_worker_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emlxd.registry.TICK", 0.0)
    house = House()
    registry = house.registry(model("a"), stall_timeout=60)
    watching = asyncio.create_task(registry.watch())
    await registry.load()
    await settle()
    assert not watching.done()
    next(iter(house.residents)).worker.heartbeat_age = 61.0  # type: ignore[misc]
    with pytest.raises(ServerFault, match="worker of a"):
        await watching


async def test_a_death_that_a_request_sees_first_is_one_too() -> None:
    house, registry = await with_a_dead_worker()
    with pytest.raises(Unavailable, match="ended unexpectedly"):
        await use(registry, "a")
    assert registry.find("a").failures == 1
    house.now += 60
    registry.tick()
    await settle()
    assert house.in_memory == ["a"]
