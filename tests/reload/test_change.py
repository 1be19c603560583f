"""A registry changes whole or not at all, and no request notices more than a wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from emlxd.config import ModelSettings, Settings
from emlxd.errors import ModelFormatError, ModelNotFound, NoRoom, SourceError
from emlxd.registry import Registry
from emlxd.reload.change import Change
from emlxd.reload.plan import plan
from tests.residents import ON_DEMAND, House, model, settle


async def loaded(house: House, *models: ModelSettings) -> Registry:
    registry = house.registry(*models)
    await registry.load()
    return registry


def change(registry: Registry, *models: ModelSettings) -> asyncio.Task[None]:
    old = Settings(models=tuple(entry.settings for entry in registry.models))
    found = plan(old, Settings(models=models))
    return asyncio.create_task(Change(registry, found, models, registry.residents.budget).run())


async def use(registry: Registry, name: str) -> Any:
    async with registry.lease(name) as worker:
        return worker


async def test_models_come_and_go() -> None:
    house = House()
    registry = await loaded(house, model("a"), model("b"))
    kept = await use(registry, "b")
    await change(registry, model("b"), model("c"), model("d", **ON_DEMAND))
    await settle()
    assert [entry.name for entry in registry.models] == ["b", "c", "d"]
    assert house.starts == ["a", "b", "c"]
    assert await use(registry, "b") is kept
    with pytest.raises(ModelNotFound):
        await use(registry, "a")
    assert house.in_memory == ["b", "c"]
    assert registry.ready


async def test_a_request_to_a_removed_model_finishes() -> None:
    house = House()
    registry = await loaded(house, model("a"))
    async with registry.lease("a") as worker:
        await change(registry)
        await settle()
        assert worker.alive
        with pytest.raises(ModelNotFound):
            await use(registry, "a")
    await settle()
    assert house.closed == [worker]


async def test_a_replaced_model_serves_until_the_new_one_is_there() -> None:
    house = House()
    registry = await loaded(house, model("a"))
    async with registry.lease("a") as old:
        house.gate.clear()
        changing = change(registry, model("a", slots=8))
        await settle()
        assert await use(registry, "a") is old
        house.gate.set()
        await changing
        new = await use(registry, "a")
        assert new is not old
        assert new.settings.slots == 8
        await settle()
        assert old.alive
    await settle()
    assert house.closed == [old]
    assert registry.ready


async def test_where_both_do_not_fit_requests_wait_for_the_new_one() -> None:
    house = House(budget=150)
    registry = await loaded(house, model("a"))
    async with registry.lease("a") as old:
        changing = change(registry, model("a", slots=8))
        await settle()
        waiting = [asyncio.create_task(use(registry, "a")) for _ in range(3)]
        await settle()
        assert old.alive and house.starts == ["a"]
    await changing
    assert [worker.settings.slots for worker in await asyncio.gather(*waiting)] == [8, 8, 8]
    assert house.starts == ["a", "a"]


async def test_a_model_takes_the_room_of_one_that_is_removed() -> None:
    house = House(budget=150)
    registry = await loaded(house, model("a", pinned=True))
    async with registry.lease("a"):
        changing = change(registry, model("b"))
        await settle()
        late = asyncio.create_task(use(registry, "a"))
    await changing
    assert house.in_memory == ["b"]
    with pytest.raises(ModelNotFound):
        await late


async def test_a_new_model_that_fails_leaves_everything_as_it_was() -> None:
    house = House()
    registry = await loaded(house, model("a"), model("gone"))
    before = [entry.resident for entry in registry.models]
    house.failures["bad"] = ModelFormatError("m.gguf: is truncated")
    with pytest.raises(ModelFormatError, match=r"^bad: m\.gguf: is truncated"):
        await change(registry, model("a", slots=8), model("good"), model("bad"))
    await settle()
    assert [entry.name for entry in registry.models] == ["a", "gone"]
    assert [entry.resident for entry in registry.models] == before
    assert house.in_memory == ["a", "gone"]
    assert all([registry.ready, (await use(registry, "a")).settings.slots == 4])


async def test_nothing_is_loaded_before_all_files_are_here() -> None:
    house = House()
    registry = await loaded(house, model("a"))
    house.unprepared["lost"] = SourceError("lost.gguf does not exist")
    with pytest.raises(SourceError, match=r"^lost: lost\.gguf does not exist"):
        await change(registry, model("a"), model("good"), model("lost"))
    assert house.starts == ["a"]


async def test_the_old_model_comes_back_when_the_new_one_fails_in_its_place() -> None:
    house = House(budget=150)
    registry = await loaded(house, model("a"))
    house.gate.clear()
    changing = change(registry, model("a", slots=8))
    await settle()
    waiting = asyncio.create_task(use(registry, "a"))
    await settle()
    house.failures["a"] = ModelFormatError("m.gguf: is truncated")
    house.gate.set()
    with pytest.raises(ModelFormatError):
        await changing
    del house.failures["a"]
    assert (await waiting).settings.slots == 4
    registry.tick()
    await settle()
    assert registry.ready


async def test_a_model_on_demand_that_was_in_memory_comes_back_too() -> None:
    house = House(budget=150)
    registry = house.registry(model("a", **ON_DEMAND))
    await use(registry, "a")
    house.failures["a"] = ModelFormatError("m.gguf: is truncated")
    with pytest.raises(ModelFormatError):
        await change(registry, model("a", slots=8, **ON_DEMAND))
    del house.failures["a"]
    await settle()
    registry.tick()
    await settle()
    assert house.in_memory == ["a"]


async def test_a_model_that_stays_comes_back_when_it_had_to_leave_for_one_that_failed() -> None:
    house = House(budget=200)
    registry = await loaded(house, model("kept"), model("a"))
    house.failures["a"] = ModelFormatError("m.gguf: is truncated")
    with pytest.raises(ModelFormatError):
        await change(registry, model("kept"), model("a", prefill_chunk=200))
    del house.failures["a"]
    for _ in range(2):
        registry.tick()
        await settle()
    assert sorted(house.in_memory) == ["a", "kept"]


async def test_a_smaller_budget_that_a_model_has_no_room_in_is_refused() -> None:
    house = House(budget=200)
    registry = await loaded(house, model("a"))
    old = Settings(models=(registry.find("a").settings,))
    with pytest.raises(NoRoom, match="'a' needs 100 B of memory; the budget is 50 B"):
        await Change(registry, plan(old, old), old.models, 50).run()
    assert house.in_memory == ["a"]


async def test_a_busy_model_whose_successor_is_there_leaves_for_another() -> None:
    house = House(budget=300)
    registry = await loaded(house, model("a"), model("b"))
    async with registry.lease("a"):
        changing = change(registry, model("a", slots=8), model("b", slots=8, prefill_chunk=200))
        await settle()
        assert not changing.done()
    await changing
    assert [(await use(registry, name)).settings.slots for name in ("a", "b")] == [8, 8]


async def test_loading_a_model_that_is_removed_meanwhile() -> None:
    house = House()
    registry = house.registry(model("a", **ON_DEMAND))
    house.gate.clear()
    loading = asyncio.create_task(registry.load_now("a"))
    await settle()
    await change(registry)
    house.gate.set()
    with pytest.raises(ModelNotFound):
        await asyncio.wait_for(loading, 20)
    await settle()
    assert house.starts == ["a"] and house.in_memory == []


async def test_what_can_never_fit_is_refused_with_numbers() -> None:
    house = House(budget=150)
    registry = await loaded(house, model("a"))
    with pytest.raises(NoRoom, match="needs 200 B"):
        await change(registry, model("a"), model("big", prefill_chunk=200))
    assert house.in_memory == ["a"]
    assert await use(registry, "a")


async def test_new_models_do_not_drive_each_other_out() -> None:
    house = House(budget=250)
    registry = await loaded(house, model("a", pinned=True))
    with pytest.raises(NoRoom):
        await change(registry, model("a", pinned=True), model("b"), model("c"))
    await settle()
    assert [entry.name for entry in registry.models] == ["a"]
    assert house.in_memory == ["a"]


async def test_a_removed_model_that_still_loads_leaves_when_it_is_there() -> None:
    house = House()
    house.gate.clear()
    registry = house.registry(model("a", **ON_DEMAND))
    waiting = asyncio.create_task(use(registry, "a"))
    await settle()
    await change(registry)
    house.gate.set()
    with pytest.raises(ModelNotFound):
        await waiting
    await settle()
    assert house.residents.used == 0


async def test_retuning_keeps_the_worker() -> None:
    house = House()
    registry = await loaded(house, model("a"))
    worker = await use(registry, "a")
    await change(registry, model("a", aliases=("x",), priority=3, max_queue=1))
    assert await use(registry, "x") is worker
    assert worker.settings.max_queue == 1
    assert house.starts == ["a"]


async def test_retuning_reaches_a_model_that_is_loading() -> None:
    house = House()
    house.gate.clear()
    registry = house.registry(model("a", **ON_DEMAND))
    waiting = asyncio.create_task(use(registry, "a"))
    await settle()
    await change(registry, model("a", max_queue=1, **ON_DEMAND))
    house.gate.set()
    assert (await waiting).settings.max_queue == 1


async def test_a_model_on_demand_that_nobody_uses_is_not_loaded_to_be_replaced() -> None:
    house = House()
    registry = await loaded(house, model("a", **ON_DEMAND))
    await change(registry, model("a", slots=8, **ON_DEMAND))
    assert house.starts == []
    assert (await use(registry, "a")).settings.slots == 8


async def test_a_request_that_waits_for_a_load_gets_the_new_model() -> None:
    house = House()
    house.gate.clear()
    registry = house.registry(model("a", **ON_DEMAND), model("b", **ON_DEMAND))
    waiting = asyncio.create_task(use(registry, "a"))
    removed = asyncio.create_task(use(registry, "b"))
    await settle()
    changing = change(registry, model("a", slots=8, **ON_DEMAND))
    await settle()
    house.gate.set()
    await changing
    assert (await waiting).settings.slots == 8
    with pytest.raises(ModelNotFound):
        await removed
    await settle()
    assert house.in_memory == ["a"]


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_requests_that_wait_for_a_load_do_not_keep_the_new_model_out(count: int) -> None:
    """There is no room for both, and each request holds what was loaded until it has looked."""
    house = House(budget=150)
    house.gate.clear()
    registry = house.registry(model("a", **ON_DEMAND))
    waiting = [asyncio.create_task(use(registry, "a")) for _ in range(count)]
    await settle()
    changing = change(registry, model("a", slots=8, **ON_DEMAND))
    await settle()
    house.gate.set()
    for _ in range(5):
        await settle()
    assert changing.done()
    assert [(await request).settings.slots for request in waiting] == [8] * count


async def test_made_startup_it_is_loaded_soon() -> None:
    house = House()
    registry = await loaded(house, model("a", **ON_DEMAND))
    await change(registry, model("a"))
    registry.tick()
    await settle()
    assert house.in_memory == ["a"]
