"""The page, the dashboard and the alerts speak of the metrics that exist, and the page of all of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from emlxd.vllm_names import NAMES
from tests.metrics.house import house

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs"
PAGE = (DOCS / "metrics.md").read_text()
DASHBOARD = json.loads((DOCS / "grafana-dashboard.json").read_text())
ROWS = ["Traffic", "Latency", "Tokens", "Cache", "Memory", "Reloads"]

promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def run_promtool(*arguments: str, stdin: str = "") -> None:
    done = subprocess.run(["promtool", *arguments], input=stdin, capture_output=True, text=True, cwd=HERE)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


def metric_names(text: str) -> set[str]:
    """``emlxd_x_bucket`` is of ``emlxd_x``; a word that ends in _ is a prefix and no name."""
    found = re.findall(r"\b(?:emlxd_|vllm:)[a-z0-9_]*[a-z]\b", text)
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in found}


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """Each with the title of its panel."""
    for panel in DASHBOARD["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", []))


async def exposition(**settings: Any) -> str:
    """What a daemon shows after a request and an unloading."""
    async with house(**settings) as daemon:
        await daemon.complete(max_tokens=3)
        (entry,) = daemon.registry.models
        assert entry.resident is not None
        gone = entry.resident.gone
        daemon.registry.unload(entry)
        await gone.wait()
        await daemon.complete(max_tokens=3)
        return (await daemon.http.get("/metrics")).text


def exposed(text: str) -> set[str]:
    return set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))


async def test_the_page_lists_what_exists_and_nothing_else() -> None:
    listed = set(re.findall(r"^\| `(emlxd_[a-z_]+)`", PAGE, re.MULTILINE))
    assert listed == exposed(await exposition())
    assert metric_names(PAGE) == exposed(await exposition(metrics={"vllm_names": True}))
    assert PAGE.count("| `vllm:") == len(NAMES) + 1


async def test_types_and_labels_are_as_on_the_page() -> None:
    text = await exposition()
    for name, kind, labels in re.findall(r"^\| `(emlxd_\w+)` \| (\w+) \| ([\w, ]*) \|", PAGE, re.MULTILINE):
        assert f"# TYPE {name} {kind}\n" in text
        sample = re.search(rf"^{name}(?:_count)?(?:\{{(.*)\}})? ", text, re.MULTILINE)
        assert sample, f"{name} has no value"
        shown = set(re.findall(r'(\w+)="', sample[1] or ""))
        assert shown == set(labels.split(", ")) - {""}, name


@pytest.mark.parametrize("file", ["grafana-dashboard.json", "alerts.yml"])
async def test_what_is_asked_for_exists(file: str) -> None:
    assert metric_names((DOCS / file).read_text()) <= exposed(await exposition())


async def test_the_dashboard_shows_every_metric() -> None:
    shown = metric_names(" ".join(query for _, query in dashboard_queries()))
    assert exposed(await exposition()) <= shown


def test_the_dashboard_has_its_rows_and_fits_the_grid() -> None:
    panels = DASHBOARD["panels"]
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == ROWS
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24


@promtool
async def test_promtool_likes_the_metrics() -> None:
    run_promtool("check", "metrics", stdin=await exposition())


@promtool
def test_promtool_likes_the_alerts() -> None:
    run_promtool("check", "rules", str(DOCS / "alerts.yml"))


@promtool
def test_each_alert_is_raised_and_ends() -> None:
    run_promtool("test", "rules", "alerts_test.yml")
    tested = set(re.findall(r"alertname: (\w+)", (HERE / "alerts_test.yml").read_text()))
    assert tested == set(re.findall(r"alert: (\w+)", (DOCS / "alerts.yml").read_text()))
