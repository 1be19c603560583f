"""Many reloads beside many clients, over real HTTP: nobody is cut off and nobody is refused without cause."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.daemon_of_fakes import DAMAGED, FakeDaemon, fake_daemon

CLIENTS = 16
NAMES = ("stays", "a", "b", "c", "d")
WORDS = "one two three four five six"


@dataclass(frozen=True)
class Served:
    """Names that are served for certain, and those that may be: until a reload is decided they differ."""

    certainly: set[str]
    possibly: set[str]


@dataclass
class Report:
    """What clients saw, and what of it they should not have seen."""

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    closed: bool = False


async def ask(http: httpx.AsyncClient, name: str, stream: bool) -> tuple[int, str, bool]:
    """Status, text, and whether the answer is whole."""
    body = {"model": name, "stream": stream, "messages": [{"role": "user", "content": "hi"}]}
    answer = await http.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]["message"], True
    if not stream:
        return 200, answer.json()["choices"][0]["message"]["content"], True
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    pieces = [json.loads(event) for event in events[:-1]]
    text = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces)
    return 200, text, events[-1] == "[DONE]"


async def client(daemon: FakeDaemon, served: list[Served], report: Report, seed: int) -> None:
    """Asks until the report is closed. ``served`` grows with each reload."""
    choose = random.Random(seed)
    async with httpx.AsyncClient(base_url=daemon.url, timeout=60, verify=False) as http:
        while not report.closed:
            name, stream, before = choose.choice(NAMES), choose.random() < 0.5, len(served) - 1
            status, text, whole = await ask(http, name, stream)
            during = served[before:]
            report.answers[f"{status}"] += 1
            if status == 200 and whole and text == WORDS and any(name in names.possibly for names in during):
                continue
            if status == 404 and any(name not in names.certainly for names in during):
                continue
            report.wrong.append(f"{name}: {status} {text!r} {'whole' if whole else 'cut'} {during}")


def next_models(models: dict[str, Any], choose: random.Random) -> tuple[str, dict[str, Any]]:
    """A kind of change, and the models after it."""
    kind = choose.choice(["equal", "add", "drop", "replace", "retune", "invalid", "damaged"])
    models, name = dict(models), choose.choice(NAMES[1:])
    match kind:
        case "add":
            models[name] = models.get(name) or {"load": choose.choice(["startup", "on_demand"])}
        case "damaged":
            models[name] = {"load": "startup", "slots": DAMAGED}
        case "drop":
            models.pop(name, None)
        case "replace" if name in models:
            models[name] = models[name] | {"slots": choose.randint(1, 200)}
        case "retune" if name in models:
            models[name] = models[name] | {"priority": choose.randint(0, 9)}
    return kind, models


async def reload_often(daemon: FakeDaemon, served: list[Served], times: int, seed: int) -> Counter[str]:
    choose, models, results = random.Random(seed), {"stays": {}}, Counter[str]()
    async with httpx.AsyncClient(base_url=daemon.url, timeout=60, verify=False) as http:
        for _ in range(times):
            kind, wanted = next_models(models, choose)
            daemon.write(wanted)
            if kind == "invalid":
                daemon.path.write_text("models: [{name: a, sorce: x}]")
            served.append(Served(wanted.keys() & models.keys(), wanted.keys() | models.keys()))
            answer = await http.post("/admin/reload")
            results[f"{kind} {answer.status_code}"] += 1
            if answer.status_code == 200:
                models = wanted
            assert [entry.name for entry in daemon.registry.models] == list(models)
            served.append(Served(set(models), set(models)))
    return results


@pytest.mark.parametrize(
    "times", [30, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
@pytest.mark.parametrize("budget", [10_000, 250], ids=["room for all", "room for two"])
async def test_reloads_under_load(tmp_path: Path, times: int, budget: int) -> None:
    async with fake_daemon(
        tmp_path / "config.yaml", {"stays": {}}, budget=budget, drain_timeout=60
    ) as daemon:
        served = [Served({"stays"}, {"stays"})]
        report = Report()
        clients = [asyncio.create_task(client(daemon, served, report, seed)) for seed in range(CLIENTS)]
        results = await reload_often(daemon, served, times, seed=budget + times)
        report.closed = True
        await asyncio.gather(*clients)
    no_room = [wrong for wrong in report.wrong if "of memory; the budget is" in wrong]
    assert [wrong for wrong in report.wrong if wrong not in no_room] == []
    assert not no_room or budget == 250
    assert report.answers["200"] > times
    assert {key.split()[0] for key in results} >= {"equal", "add", "drop", "invalid"}
    assert all(key.endswith(" 400") for key in results if key.startswith("invalid"))
    assert not results["damaged 200"]
    assert all(key.endswith(" 200") for key in results if key.startswith("equal"))
