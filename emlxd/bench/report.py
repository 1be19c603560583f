"""A bench result for people and for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.table import Table

from emlxd.bench.http import BenchResult, Spread

if TYPE_CHECKING:
    from emlxd.bench.engine import Line


def to_json(result: BenchResult) -> str:
    """The whole result as JSON: times in seconds, rates in tokens a second."""
    return json.dumps(asdict(result), indent=2)


def to_table(result: BenchResult) -> Table:
    """A table with a line for each row: the median, with lowest and highest beneath it."""
    table = Table(title=f"{result.model} at {result.url}", show_lines=True)
    for heading in ("streams", "prompt", "answer", "first token ms", "gap ms"):
        table.add_column(heading, justify="right")
    for heading in ("prefill tok/s", "decode tok/s", "total tok/s"):
        table.add_column(heading, justify="right")
    for row in result.rows:
        table.add_row(
            str(row.concurrency),
            str(row.prompt_tokens),
            str(row.completion_tokens) if row.counted else f"~{row.completion_tokens}",
            _cell(row.ttft, 1000),
            _cell(row.gap, 1000),
            _cell(row.prefill_rate),
            _cell(row.decode_rate),
            _cell(row.total_rate),
        )
    table.caption = (
        f"Median (lowest to highest) of {result.repeats} rounds of up to {result.max_tokens} tokens. "
        "Prefill and decode are of one stream, total is of all. Gap is between chunks."
    )
    if not all(row.counted for row in result.rows):
        table.caption += " ~ The server does not count tokens: one chunk counts as one."
    return table


def engine_to_json(lines: Sequence[Line]) -> str:
    """As JSON: rates in tokens a second, times in milliseconds."""
    return json.dumps([asdict(line) for line in lines], indent=2)


def engine_table(model: str, lines: Sequence[Line]) -> Table:
    """A line for each program and number of streams; rates are those of all streams together."""
    table = Table(title=f"The engine alone: {model}", show_lines=True)
    table.add_column("")
    for heading in ("streams", "prefill tok/s", "decode tok/s"):
        table.add_column(heading, justify="right")
    for heading in ("step ms", "host ms", "device ms", "ops", "of ceiling"):
        table.add_column(heading, justify="right")
    for line in lines:
        table.add_row(
            line.name,
            str(line.streams),
            _with_range(line.prefill, line.prefill_range),
            _with_range(line.decode, line.decode_range),
            f"{line.step_ms:.2f}",
            "" if line.host_ms is None else f"{line.host_ms:.2f}",
            "" if line.device_ms is None else f"{line.device_ms:.2f}",
            str(line.operations),
            "" if line.ceiling is None else f"{line.ceiling:.0%}",
        )
    table.caption = (
        "Median (lowest to highest). Host and device: a step alone, until it is dispatched and from then on; "
        "else the host dispatches a step while the one before runs. Ops: MLX's operations in a step. The "
        "ceiling is reading what a step needs of the weights, once, as fast as this device copies memory."
    )
    return table


def to_comparison(first: BenchResult, second: BenchResult) -> Table:
    """How many times as good ``first`` is, row by row: above 1 it is the better one."""
    table = Table(title=f"{first.url} against {second.url}")
    for heading in ("streams", "prompt", "first token", "prefill", "decode", "total"):
        table.add_column(heading, justify="right")
    for one, other in zip(first.rows, second.rows, strict=True):
        table.add_row(
            str(one.concurrency),
            str(one.prompt_tokens),
            _times(other.ttft, one.ttft),  # less is better
            _times(one.prefill_rate, other.prefill_rate),
            _times(one.decode_rate, other.decode_rate),
            _times(one.total_rate, other.total_rate),
        )
    table.caption = "Medians: above 1.00 the first one is better."
    return table


def _times(better: Spread | None, worse: Spread | None) -> str:
    return f"{better.median / worse.median:.2f}x" if better and worse else "-"


def _cell(spread: Spread | None, factor: float = 1) -> str:
    if spread is None:
        return "-"
    middle, low, high = (_round(value * factor) for value in (spread.median, spread.low, spread.high))
    return middle if low == high else f"{middle}\n({low} to {high})"


def _with_range(middle: float, ends: tuple[float, float]) -> str:
    return f"{middle:,.0f}\n({ends[0]:,.0f} to {ends[1]:,.0f})"


def _round(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
