"""The chart and the comparison of two results."""

from __future__ import annotations

import io
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from emlxd.bench.chart import nice_top, to_svg
from emlxd.bench.http import BenchResult, Row, Spread
from emlxd.bench.report import to_comparison


def spread(value: float) -> Spread:
    return Spread(value, value * 0.9, value * 1.1, value)


def row(concurrency: int, rate: float) -> Row:
    rates = spread(rate)
    return Row(concurrency, 400, 128, 3, True, spread(10 / rate), None, rates, None, rates)


@pytest.fixture
def fast() -> BenchResult:
    rows = (row(1, 100.0), row(8, 400.0))
    return BenchResult(
        url="http://a", model="m<1>", api="chat", max_tokens=128, repeats=3, shared_prefix=0, rows=rows
    )


@pytest.mark.parametrize(("highest", "top"), [(0.3, 0.5), (1.0, 1.0), (440.0, 500.0), (501.0, 1000.0)])
def test_the_scale_ends_at_a_round_number(highest: float, top: float) -> None:
    assert nice_top(highest) == pytest.approx(top)


def test_a_bar_is_as_high_as_its_rate(fast: BenchResult) -> None:
    svg = to_svg([fast])
    bars = [float(each.attrib["height"]) for each in ElementTree.fromstring(svg).findall("{*}rect")[1:]]
    assert bars[1] / bars[0] == pytest.approx(4.0, rel=0.01)
    assert "m&lt;1&gt; at http://a" in svg


def test_a_comparison_says_how_many_times_as_good(fast: BenchResult) -> None:
    slow = replace(fast, url="http://b", rows=(row(1, 50.0), row(8, 500.0)))
    said = io.StringIO()
    Console(file=said, width=120).print(to_comparison(fast, slow))
    rows = [line for line in said.getvalue().splitlines() if "400" in line]
    assert [cell.strip() for cell in rows[0].split("│")][3:7] == ["2.00x", "2.00x", "-", "2.00x"]
    assert [cell.strip() for cell in rows[1].split("│")][3:7] == ["0.80x", "0.80x", "-", "0.80x"]
