"""When models are loaded and unloaded, whoever asks for them, in whatever order."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emlxd.config import ModelSettings
from emlxd.errors import (
    ModelFormatError,
    ModelNotFound,
    NoRoom,
    SourceError,
    Unavailable,
    UserError,
)
from emlxd.memory import Needs
from emlxd.registry import LAST_RETRY, Registry
from emlxd.residency import Residents
from tests.residents import ON_DEMAND, House, StubWorker, model, settle, use

# Loading


async def test_startup_models_are_loaded_in_order_of_priority() -> None:
    house = House()
    registry = house.registry(model("a"), model("b", priority=1), model("c", **ON_DEMAND))
    assert not registry.ready
    await registry.load()
    assert house.starts == ["b", "a"]
    assert registry.ready
    assert {entry.name: entry.state for entry in registry.models} == {
        "a": "loaded",
        "b": "loaded",
        "c": "unloaded",
    }


async def test_startup_models_are_loaded_one_by_one_and_once_whatever_else_happens() -> None:
    house = House()
    house.gate.clear()
    registry = house.registry(model("a", priority=3), model("b"), model("c", priority=1), model("d"))
    starting = asyncio.create_task(registry.load())
    await settle()
    registry.tick()
    await settle()
    assert house.starts == ["a"]
    asked = asyncio.create_task(use(registry, "d"))
    await settle()
    house.gate.set()
    assert await asked == "d"
    await starting
    assert house.starts == ["a", "d", "c", "b"]
    assert house.closed == []


async def test_an_alias_is_the_same_model() -> None:
    house = House()
    registry = house.registry(model("a", aliases=("x",), **ON_DEMAND))
    assert [await use(registry, name) for name in ("a", "x")] == ["a", "a"]
    assert house.starts == ["a"]
    with pytest.raises(ModelNotFound, match="/v1/models"):
        await use(registry, "y")


async def test_a_name_with_an_adapter_is_its_model() -> None:
    house = House()
    adapter = {"name": "b", "source": {"path": "/b"}}
    registry = house.registry(model("a", adapters=[adapter], **ON_DEMAND))
    assert registry.find("a:b") is registry.find("a")
    assert registry.find("a").adapters == ("a:b",)
    with pytest.raises(ModelNotFound, match="/v1/models"):
        await use(registry, "a:c")


async def test_forty_requests_at_once_load_a_model_once() -> None:
    house = House()
    house.gate.clear()
    registry = house.registry(model("a", **ON_DEMAND))
    requests = [asyncio.create_task(use(registry, "a")) for _ in range(40)]
    await settle()
    assert registry.find("a").state == "loading"
    house.gate.set()
    assert await asyncio.gather(*requests) == ["a"] * 40
    assert house.starts == ["a"]


async def test_a_client_that_leaves_does_not_stop_the_load_for_others() -> None:
    house = House()
    house.gate.clear()
    registry = house.registry(model("a", **ON_DEMAND))
    leaving, staying = (asyncio.create_task(use(registry, "a")) for _ in range(2))
    await settle()
    leaving.cancel()
    await settle()
    house.gate.set()
    assert await staying == "a"
    assert house.starts == ["a"]


async def test_a_failed_load_gives_all_the_reason_and_backs_off() -> None:
    house = House()
    house.failures["a"] = ModelFormatError("m.gguf: is truncated")
    registry = house.registry(model("a", **ON_DEMAND))
    failed = await asyncio.gather(*(use(registry, "a") for _ in range(3)), return_exceptions=True)
    for error in failed:
        assert isinstance(error, Unavailable) and error.status == 503
        assert error.message == "The model 'a' could not be loaded: m.gguf: is truncated"
    assert (house.starts, house.in_memory, registry.find("a").state) == (["a"], [], "failed")
    with pytest.raises(Unavailable, match="is truncated") as caught:
        await use(registry, "a")
    assert (house.starts, caught.value.retry_after) == (["a"], 1)
    for wait in (1.0, 2.0, 4.0):
        house.now += wait - 0.1
        with pytest.raises(Unavailable):
            await use(registry, "a")
        before = len(house.starts)
        house.now += 0.1
        with pytest.raises(Unavailable):
            await use(registry, "a")
        assert len(house.starts) == before + 1
    del house.failures["a"]
    house.now += LAST_RETRY
    assert await use(registry, "a") == "a"
    assert registry.find("a").error is None


async def test_a_load_may_fail_for_days() -> None:
    house = House()
    house.failures["a"] = ModelFormatError("m.gguf: is truncated")
    registry = house.registry(model("a", required=False))
    for _ in range(1100):
        registry.tick()
        await settle()
        house.now += LAST_RETRY
    assert len(house.starts) == 1100
    assert registry.find("a").retry_at == house.now


async def test_a_load_counts_as_failed_wherever_it_fails() -> None:
    house = House()
    house.unprepared["a"] = SourceError("a: cannot be downloaded")
    house.failures["b"] = ModelFormatError("m.gguf: is truncated")
    registry = house.registry(*(model(name, **ON_DEMAND) for name in "abc"))
    await asyncio.gather(*(use(registry, name) for name in "abc"), return_exceptions=True)
    assert house.residents.loads == {("a", "failure"): 1, ("b", "failure"): 1, ("c", "success"): 1}


async def test_an_unforeseen_failure_is_told_without_its_inside() -> None:
    house = House()
    house.failures["a"] = KeyError("secret")
    registry = house.registry(model("a", **ON_DEMAND))
    with pytest.raises(Unavailable) as caught:
        await use(registry, "a")
    assert "secret" not in caught.value.message


async def test_a_request_waits_no_longer_than_load_timeout() -> None:
    house = House()
    house.gate.clear()
    registry = house.registry(model("a", load_timeout=0.001, **ON_DEMAND))
    with pytest.raises(Unavailable, match="still loading"):
        await use(registry, "a")
    house.gate.set()
    await settle()
    assert await use(registry, "a") == "a"
    assert house.starts == ["a"]


async def test_a_required_model_that_fails_ends_the_start() -> None:
    house = House()
    house.failures["a"] = ModelFormatError("m.gguf: is truncated")
    with pytest.raises(ModelFormatError, match="truncated"):
        await house.registry(model("a")).load()
    house = House(budget=50)
    with pytest.raises(UserError, match=r"needs 100 B of memory; the budget is 50 B"):
        await house.registry(model("a")).load()


async def test_another_one_is_tried_again_later() -> None:
    house = House()
    house.failures["a"] = ModelFormatError("m.gguf: is truncated")
    registry = house.registry(model("a", required=False), model("b"))
    await registry.load()
    assert registry.ready
    del house.failures["a"]
    registry.tick()
    await settle()
    assert house.starts == ["a", "b"]
    house.now += 1.0
    registry.tick()
    await settle()
    assert house.in_memory == ["b", "a"]


# Leaving


async def test_an_idle_model_leaves() -> None:
    house = House()
    registry = house.registry(
        model("a", idle_unload=10, **ON_DEMAND),
        model("pinned", idle_unload=10, pinned=True),
        model("stays"),
    )
    await registry.load()
    async with registry.lease("a"):
        house.now = 50.0
        registry.tick()
        await settle()
        assert "a" in house.in_memory
    house.now = 59.9
    registry.tick()
    assert "a" in house.in_memory
    house.now = 60.0
    registry.tick()
    await settle()
    assert house.in_memory == ["pinned", "stays"]
    assert (registry.find("a").state, registry.ready) == ("unloaded", True)
    assert await use(registry, "a") == "a"


async def test_unloading_waits_for_the_requests_that_run() -> None:
    house = House()
    registry = house.registry(model("a"))
    await registry.load()
    async with registry.lease("a") as first:
        registry.unload(registry.find("a"))
        await settle()
        assert first.alive and house.closed == []
        async with registry.lease("a") as second:
            assert second is not first
        assert house.residents.used == 200
    await settle()
    assert house.closed == [first]
    assert house.residents.used == 100


async def test_a_request_during_the_start_takes_nothing_down() -> None:
    """It has taken the room of a model that is to be loaded, which comes when that request has ended."""
    house = House(budget=200)
    registry = house.registry(model("a", pinned=True), model("b"), model("asked", **ON_DEMAND))
    house.gate.clear()
    starting = asyncio.create_task(registry.load())
    await settle()
    async with AsyncExitStack() as request:
        asking = asyncio.create_task(request.enter_async_context(registry.lease("asked")))
        await settle()
        house.gate.set()
        await asyncio.gather(starting, asking)
        assert not registry.ready
    house.now += 60
    registry.tick()
    await settle()
    assert registry.ready and "b" in house.in_memory


async def test_what_an_operator_unloads_is_no_reason_to_be_unready() -> None:
    house = House()
    registry = house.registry(model("a"))
    await registry.load()
    registry.unload(registry.find("a"))
    registry.tick()
    await settle()
    assert registry.ready and house.in_memory == []
    await registry.load_now("a")
    assert house.in_memory == ["a"]


async def test_closing_ends_everything_even_what_still_loads() -> None:
    house = House()
    registry = house.registry(model("a"), model("b", **ON_DEMAND))
    await registry.load()
    house.gate.clear()
    waiting = asyncio.create_task(use(registry, "b"))
    await settle()
    async with registry.lease("a"):
        await registry.close()
    house.gate.set()
    with pytest.raises(Unavailable):
        await waiting
    assert [worker.name for worker in house.closed] == ["a", "b"]


# The budget


async def test_the_least_recently_used_idle_model_makes_room() -> None:
    house = House(budget=300)
    registry = house.registry(*(model(name, **ON_DEMAND) for name in "abcd"))
    for house.now, name in enumerate("abca"):
        await use(registry, name)
    await use(registry, "d")
    assert house.in_memory == ["a", "c", "d"]


async def test_who_asks_is_told_what_steps_of_loaded_models_take() -> None:
    """When they come, before they load, and when they are gone."""
    told: list[int] = []

    async def prepare(settings: ModelSettings) -> Needs:
        return Needs(weights=10, activations=settings.prefill_chunk)

    house = House()
    residents = Residents(
        1000,
        lambda settings: StubWorker(settings, house),  # type: ignore[arg-type,return-value]
        prepare,
        changed=lambda: told.append(residents.activations),
    )
    registry = Registry([model("a"), model("b", prefill_chunk=70)], residents, stall_timeout=0)
    await registry.load()
    assert told == [100, 170]
    await registry.close()
    assert told[2:] in ([70, 0], [100, 0])


@pytest.mark.parametrize(
    ("held", "reason"), [({"pinned": True}, "pinned"), ({"priority": 1}, "idle"), ({}, "in use")]
)
async def test_who_cannot_leave_is_named_with_numbers(held: dict[str, Any], reason: str) -> None:
    house = House(budget=150)
    registry = house.registry(model("a", **held), model("b", **ON_DEMAND))
    await registry.load()
    async with AsyncExitStack() as stack:
        if reason == "in use":
            await stack.enter_async_context(registry.lease("a"))
        with pytest.raises(NoRoom) as caught:
            await use(registry, "b")
    assert caught.value.message == (
        f"The model 'b' needs 100 B of memory; the budget is 150 B, and in memory is a 100 B ({reason})."
    )
    assert (caught.value.status, caught.value.code) == (503, "insufficient_memory")
    assert (house.starts, house.in_memory) == (["a"], ["a"])


async def test_no_room_is_no_failure_to_back_off_from() -> None:
    house = House(budget=150)
    registry = house.registry(model("a"), model("b", **ON_DEMAND))
    await registry.load()
    async with registry.lease("a"):
        with pytest.raises(NoRoom):
            await use(registry, "b")
    assert await use(registry, "b") == "b"
    assert house.in_memory == ["b"]
    assert registry.ready, "a left for b, as it may"


async def test_nobody_leaves_in_vain() -> None:
    house = House(budget=300)
    registry = house.registry(
        model("a"), model("b", pinned=True, prefill_chunk=150), model("c", prefill_chunk=280, **ON_DEMAND)
    )
    await registry.load()
    with pytest.raises(NoRoom):
        await use(registry, "c")
    assert house.in_memory == ["a", "b"]


async def test_two_models_without_room_for_both_do_not_chase_each_other() -> None:
    house = House(budget=150)
    registry = house.registry(model("a", **ON_DEMAND), model("b", **ON_DEMAND))
    asking = [asyncio.create_task(use(registry, name)) for name in "abab"]
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert {answer for answer in answers if isinstance(answer, str)} >= {"a"}
    assert all(isinstance(answer, str | NoRoom) for answer in answers)
    assert len(house.starts) <= 4


async def test_room_that_is_about_to_be_free_is_waited_for() -> None:
    house = House(budget=150)
    registry = house.registry(model("a"), model("b", **ON_DEMAND))
    await registry.load()
    async with registry.lease("a"):
        registry.unload(registry.find("a"))
        waiting = asyncio.create_task(use(registry, "b"))
        await settle()
        assert house.starts == ["a"]
    assert await waiting == "b"


# Anything in any order

BYTES = st.sampled_from([40, 60, 100])
MODELS = st.lists(
    st.builds(
        lambda size, priority, pinned, idle: {
            "prefill_chunk": size,
            "priority": priority,
            "pinned": pinned,
            "idle_unload": idle,
        },
        BYTES,
        st.integers(0, 1),
        st.booleans(),
        st.sampled_from([0, 3]),
    ),
    min_size=1,
    max_size=4,
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 3)),
        st.tuples(st.just("end"), st.integers(0, 7)),
        st.tuples(st.just("unload"), st.integers(0, 3)),
        st.tuples(st.just("die"), st.integers(0, 3)),
        st.tuples(st.just("fail"), st.integers(0, 3)),
        st.tuples(st.just("tick"), st.integers(0, 4)),
        st.tuples(st.just("gate"), st.integers(0, 1)),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(MODELS, ACTIONS)
def test_whatever_happens_the_budget_holds_and_no_lease_is_cut(
    models: list[dict[str, Any]], actions: list[tuple[str, int]]
) -> None:
    asyncio.run(_anything([model(f"m{i}", **ON_DEMAND, **m) for i, m in enumerate(models)], actions))


async def _anything(models: list[ModelSettings], actions: list[tuple[str, int]]) -> None:
    house = House(budget=150)
    registry = house.registry(*models)
    requests: list[tuple[asyncio.Task[None], asyncio.Event]] = []

    async def request(name: str, end: asyncio.Event) -> None:
        async with registry.lease(name) as worker:
            await end.wait()
            assert worker not in house.closed, "unloaded under a request"

    for what, number in actions:
        name = models[number % len(models)].name
        match what:
            case "begin":
                end = asyncio.Event()
                requests.append((asyncio.create_task(request(name, end)), end))
            case "end" if requests:
                requests[number % len(requests)][1].set()
            case "unload":
                with suppress(Unavailable):  # while it is loading
                    registry.unload(registry.find(name))
            case "die" if resident := registry.find(name).resident:
                resident.worker.alive = False  # type: ignore[misc]
            case "fail":
                house.failures[name] = ModelFormatError("damaged")
            case "tick":
                house.now += number
                registry.tick()
            case "gate":
                (house.gate.set if number else house.gate.clear)()
        await settle()
        assert house.residents.used <= house.budget

    house.failures.clear()
    house.gate.set()
    for _, end in requests:
        end.set()
    results = await asyncio.gather(*(task for task, _ in requests), return_exceptions=True)
    assert all(result is None or isinstance(result, Unavailable) for result in results), results
    house.now += LAST_RETRY
    await settle()
    await registry.close()
    assert house.residents.used == 0
