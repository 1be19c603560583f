"""Bench results as a chart in SVG: tokens a second of all streams, a bar for each server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final

from emlxd.bench.http import BenchResult, Row

WIDTH: Final = 720
HEIGHT: Final = 340
LEFT, TOP, BOTTOM = 56, 64, 52  # around the plot
PLOT: Final = HEIGHT - TOP - BOTTOM
STYLE: Final = """\
text { font: 12px system-ui, sans-serif; fill: #57534e }
.title { font-size: 15px; font-weight: 600; fill: #1c1917 }
.value { font-weight: 600; fill: #1c1917 }
.grid { stroke: #d6d3d1 } .spread { stroke: #1c1917; stroke-opacity: .6 }
.s0 { fill: #c2410c } .s1 { fill: #78716c }
@media (prefers-color-scheme: dark) {
  text { fill: #a8a29e } .title, .value { fill: #f5f5f4 }
  .grid { stroke: #44403c } .spread { stroke: #f5f5f4 }
  .s0 { fill: #fb923c } .s1 { fill: #a8a29e }
}"""


def to_svg(results: Sequence[BenchResult]) -> str:
    """One or two results with the same rows: medians as bars, lowest to highest as a line on each."""
    groups = list(zip(*(result.rows for result in results), strict=True))
    top = nice_top(max(row.total_rate.high for group in groups for row in group))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<style>{STYLE}</style>",
        _text(LEFT, 24, "Tokens a second, all streams together", "title"),
        *_legend(results),
        *_grid(top),
    ]
    width = (WIDTH - LEFT - 16) / len(groups)
    for place, group in enumerate(groups):
        parts += _group(LEFT + place * width, width, group, top)
    return "\n".join([*parts, "</svg>", ""])


def nice_top(highest: float) -> float:
    """The end of the scale: 1, 2 or 5 times a power of ten, at or above ``highest``."""
    power = 10.0 ** math.floor(math.log10(highest))
    return float(next(step * power for step in (1, 2, 5, 10) if step * power >= highest))


def _legend(results: Sequence[BenchResult]) -> list[str]:
    parts = []
    for place, result in enumerate(results):
        left = LEFT + place * (WIDTH - LEFT) / 2
        parts.append(f'<rect class="s{place}" x="{left:.0f}" y="36" width="10" height="10" rx="2"/>')
        parts.append(_text(left + 16, 45, f"{result.model} at {result.url}"))
    return parts


def _grid(top: float) -> list[str]:
    parts = []
    for step in range(5):
        y = TOP + PLOT - PLOT * step / 4
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - 16}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{top * step / 4:,g}", anchor="end"))
    return parts


def _group(left: float, width: float, rows: Sequence[Row], top: float) -> list[str]:
    """The bars of one number of streams and length of prompt."""
    bar = min(64.0, width * 0.8 / len(rows))
    start = left + (width - bar * len(rows)) / 2
    parts = []
    for place, row in enumerate(rows):
        x, rate = start + place * bar, row.total_rate
        middle, high = x + bar / 2, PLOT * rate.median / top
        low_y, high_y = (TOP + PLOT - PLOT * value / top for value in (rate.low, rate.high))
        parts.append(
            f'<rect class="s{place}" x="{x + 2:.1f}" y="{TOP + PLOT - high:.1f}" '
            f'width="{bar - 4:.1f}" height="{high:.1f}" rx="3"/>'
        )
        parts.append(f'<path class="spread" d="M{middle:.1f} {low_y:.1f}V{high_y:.1f}"/>')
        parts.append(_text(middle, high_y - 6, f"{rate.median:,.0f}", "value", "middle"))
    streams = "1 stream" if rows[0].concurrency == 1 else f"{rows[0].concurrency} streams"
    parts.append(_text(left + width / 2, HEIGHT - 30, streams, anchor="middle"))
    parts.append(
        _text(left + width / 2, HEIGHT - 14, f"prompts of {rows[0].prompt_tokens} tokens", anchor="middle")
    )
    return parts


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'
