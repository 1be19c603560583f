"""One file, one configuration in force, and the reason if a new one is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emlxd.config import Settings
from emlxd.config_file import load
from emlxd.errors import ConfigError, EmlxdError, ModelFormatError, NoRoom, ServerFault, UserError
from emlxd.metrics import Metrics
from emlxd.operate import Operator
from emlxd.registry import Registry
from emlxd.reload.reloader import Reloader
from tests.api.conftest import sample_value
from tests.residents import House, settle

MODEL = "{name: %s, source: {pypi: 'x==1', file: x.gguf}, prefill_chunk: 100%s}"


class Setup:
    """A reloader on a real file, with workers that are none."""

    def __init__(self, path: Path, *models: str) -> None:
        self.path = path
        self.house = House()
        self.refusal: UserError | None = None
        self.in_force: list[Settings] = []
        self.write(*models)
        settings = load(path, {})
        self.registry: Registry = self.house.registry(*settings.models)
        self.metrics = Metrics(device="fake")
        self.reloader = Reloader(
            path, settings, self.registry, self.metrics, apply=self.apply, budget=lambda _: self.house.budget
        )
        self.operator = Operator(self.registry, self.reloader, lambda: {"active": 7})

    def write(self, *models: str, rest: str = "") -> None:
        listed = ", ".join(MODEL % tuple((m + "|").split("|")[:2]) for m in models)
        self.path.write_text(f"models: [{listed}]\n{rest}\n")

    def apply(self, settings: Settings) -> Callable[[], None]:
        if self.refusal:
            raise self.refusal
        return lambda: self.in_force.append(settings)

    def metric(self, name: str, **labels: str) -> float | None:
        return sample_value(self.metrics, f"emlxd_config_{name}", labels)

    @property
    def served(self) -> list[str]:
        return [entry.name for entry in self.registry.models]


@pytest.fixture
async def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.delenv("EMLXD_CONFIG", raising=False)
    setup = Setup(tmp_path / "config.yaml", "a", "b")
    await setup.registry.load()
    return setup


async def test_a_changed_file_is_applied(setup: Setup) -> None:
    setup.write("b", "c", rest="log: {level: debug}")
    found = await setup.reloader.reload()
    assert (found.keep, found.add, found.drop, found.settings) == (("b",), ("c",), ("a",), ("log.level",))
    assert setup.served == ["b", "c"]
    assert setup.in_force[-1].log.level == "debug" == setup.reloader.settings.log.level
    assert setup.metric("reloads_total", result="changed") == 1
    assert setup.metric("last_reload_successful") == 1


async def test_a_file_that_was_edited_while_the_daemon_started(setup: Setup) -> None:
    assert not setup.reloader.outdated
    setup.write("a", "c")
    assert setup.reloader.outdated
    await setup.reloader.reload()
    assert not setup.reloader.outdated
    setup.path.unlink()
    assert setup.reloader.outdated


async def test_an_equal_file_changes_nothing(setup: Setup) -> None:
    before = [entry.resident for entry in setup.registry.models]
    setup.path.write_text(setup.path.read_text() + "# a comment\n")
    assert (await setup.reloader.reload()).empty
    assert [entry.resident for entry in setup.registry.models] == before
    assert setup.metric("reloads_total", result="unchanged") == 1


def break_file(setup: Setup) -> None:
    setup.path.write_text("models: [{name: a, sorce: {}}]\n")


def refuse_settings(setup: Setup) -> None:
    setup.write("a")
    setup.refusal = UserError("the file of keys is missing")


def break_model(setup: Setup) -> None:
    setup.write("b", "c")
    setup.house.failures["c"] = ModelFormatError("c is truncated")


def lose_model(setup: Setup) -> None:
    setup.write("b", "c")
    setup.house.unprepared["c"] = UserError("c cannot be downloaded")


def surprise(setup: Setup) -> None:
    setup.write("b", "c")
    setup.house.unprepared["c"] = RuntimeError("what?")


@pytest.mark.parametrize(
    ("harm", "kind", "reason"),
    [
        (break_file, ConfigError, "sorce"),
        (refuse_settings, UserError, "file of keys"),
        (break_model, ModelFormatError, "truncated"),
        (lose_model, UserError, "downloaded"),
        (surprise, ServerFault, "see the log"),
        (lambda setup: setup.path.unlink(), ConfigError, "cannot read"),
        (lambda setup: setup.path.write_bytes(b"\xff\x00garbage"), ConfigError, "UTF-8"),
    ],
)
async def test_any_error_keeps_the_old_configuration(
    setup: Setup, harm: Callable[[Setup], None], kind: type[EmlxdError], reason: str
) -> None:
    settings, workers = setup.reloader.settings, [entry.resident for entry in setup.registry.models]
    applied = setup.metric("last_reload_success_timestamp_seconds")
    harm(setup)
    with pytest.raises(kind, match=reason):
        await setup.reloader.reload()
    assert setup.reloader.settings is settings
    assert setup.in_force == []
    assert [entry.resident for entry in setup.registry.models] == workers
    assert setup.registry.ready
    assert setup.metric("last_reload_successful") == 0
    assert setup.metric("reloads_total", result="failed") == 1
    assert setup.metric("last_reload_success_timestamp_seconds") == applied
    assert reason in setup.operator.status()["last_reload"]["error"]


async def test_a_failure_that_nobody_waits_for_is_only_reported(setup: Setup) -> None:
    break_file(setup)
    await setup.reloader.try_reload()
    assert setup.reloader.last is not None and setup.reloader.last.error


async def test_after_a_failure_the_next_file_is_applied(setup: Setup) -> None:
    break_file(setup)
    await setup.reloader.try_reload()
    setup.write("c")
    await setup.reloader.reload()
    assert setup.served == ["c"]
    assert setup.metric("last_reload_successful") == 1


async def test_a_preview_touches_nothing(setup: Setup) -> None:
    setup.write("c")
    assert setup.reloader.preview().add == ("c",)
    assert (setup.served, setup.reloader.last, setup.in_force) == (["a", "b"], None, [])


async def test_what_needs_a_restart_is_reported_until_it_happens(setup: Setup) -> None:
    setup.write("a", "b", rest="server: {port: 9000}")
    assert (await setup.reloader.reload()).needs_restart == ("server.port",)
    assert (await setup.reloader.reload()).needs_restart == ()
    assert setup.operator.status()["needs_restart"] == ["server.port"]
    setup.write("a", "b")
    assert (await setup.reloader.reload()).needs_restart == ()
    assert setup.operator.status()["needs_restart"] == []


async def test_reloads_come_one_after_the_other(setup: Setup) -> None:
    setup.house.gate.clear()
    setup.write("a", "c")
    first = asyncio.create_task(setup.reloader.reload())
    await settle()
    setup.write("a", "d")
    second = asyncio.create_task(setup.reloader.reload())
    await settle()
    assert not first.done() and not second.done()
    setup.house.gate.set()
    assert ((await first).add, (await second).add) == (("c",), ("d",))
    assert setup.served == ["a", "d"]


async def test_a_client_that_gives_up_does_not_stop_a_reload(setup: Setup) -> None:
    setup.house.gate.clear()
    setup.write("a", "c")
    waiting = asyncio.create_task(setup.reloader.reload())
    await settle()
    waiting.cancel()
    await settle()
    setup.house.gate.set()
    await settle()
    assert setup.served == ["a", "c"]


@pytest.mark.parametrize(("budget", "left"), [(300, ["a", "b"]), (150, ["b"])])
async def test_a_smaller_budget_sends_idle_models_away(setup: Setup, budget: int, left: list[str]) -> None:
    async with setup.registry.lease("b"):
        setup.house.now = 1.0
    setup.house.budget = budget
    await setup.reloader.reload()
    await settle()
    assert setup.house.in_memory == left
    assert setup.house.residents.budget == budget


async def test_a_budget_that_a_model_has_no_room_in_is_refused(setup: Setup) -> None:
    setup.house.budget = 50
    with pytest.raises(NoRoom, match="'a' needs 100 B of memory; the budget is 50 B"):
        await setup.reloader.reload()
    assert setup.house.in_memory == ["a", "b"] and setup.house.residents.budget > 50


async def test_a_larger_budget_makes_room_for_what_comes_with_it(setup: Setup) -> None:
    setup.house.budget = setup.house.residents.budget = 200
    setup.write("a|, pinned: true", "b|, pinned: true")
    await setup.reloader.reload()
    setup.house.budget = 300
    setup.write("a|, pinned: true", "b|, pinned: true", "c", "d")
    with pytest.raises(NoRoom):
        await setup.reloader.reload()
    assert setup.house.residents.budget == 200
    setup.write("a|, pinned: true", "b|, pinned: true", "c")
    await setup.reloader.reload()
    assert setup.house.in_memory == ["a", "b", "c"]


async def test_the_status_tells_all_but_secrets(setup: Setup) -> None:
    setup.write("a", "b|, idle_unload: 15m", rest="server: {api_keys: [first-key]}")
    await setup.reloader.reload()
    async with setup.registry.lease("a"):
        status: Any = setup.operator.status()
    assert "first-key" not in repr(status) + repr(setup.operator.config())
    first, second = status["models"]
    assert (first["name"], first["state"], first["requests"]) == ("a", "loaded", 1)
    assert first["memory"]["total"] == 100
    assert second["requests"] == 0
    assert status["memory"] == {"budget": 1000, "counted": 200, "active": 7}
    assert status["last_reload"]["plan"]["settings"] == ["server.api_keys"]
    assert status["config"] == str(setup.path)
