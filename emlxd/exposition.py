"""Families of metrics as Prometheus' text format 0.0.4, or as OpenMetrics 1.0.0.

A scrape of fifty models has ten thousand lines, so a line costs its formatting and nothing else: what the
lines of a series share is made once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from emlxd.instruments import AnyFamily, Family, HistogramFamily, Labels

_ESCAPED: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_OPENMETRICS: Final = "application/openmetrics-text"


@dataclass(frozen=True, slots=True)
class Format:
    """``openmetrics`` names a counter's family without its ``_total``, and says where the text ends."""

    openmetrics: bool
    content_type: str


TEXT: Final = Format(False, "text/plain; version=0.0.4; charset=utf-8")
OPENMETRICS: Final = Format(True, f"{_OPENMETRICS}; version=1.0.0; charset=utf-8")


def asked_format(accept: str) -> Format:
    """The format that an ``Accept`` header likes best. Without one that is known, it is the text format."""
    liked = sorted(map(_media_range, accept.split(",")), key=lambda found: -found[1])
    return next((format for format, quality in liked if format and quality > 0), TEXT)


def _media_range(text: str) -> tuple[Format | None, float]:
    """The format of one media range, None if it is none of ours, and its quality."""
    kind, *parameters = (part.strip().lower() for part in text.split(";"))
    given = dict(parameter.partition("=")[::2] for parameter in parameters)
    if kind == _OPENMETRICS:
        format = OPENMETRICS if given.get("version", "1.0.0") == "1.0.0" else None
    else:
        format = TEXT if kind in ("text/plain", "text/*", "*/*") else None
    try:
        return format, float(given.get("q", "1"))
    except ValueError:
        return format, 0.0


def expose(families: Iterable[AnyFamily], format: Format) -> bytes:
    """All of ``families`` in ``format``."""
    lines: list[str] = []
    for family in families:
        lines += _lines(family, openmetrics=format.openmetrics)
    if format.openmetrics:
        lines.append("# EOF")
    return ("\n".join(lines) + "\n").encode()


def _lines(family: AnyFamily, *, openmetrics: bool) -> Iterator[str]:
    name = _counter_name(family) if not openmetrics else family.name
    yield f"# HELP {name} {family.help}"
    yield f"# TYPE {name} {family.kind}"
    yield from _buckets(family) if isinstance(family, HistogramFamily) else _values(family)


def _counter_name(family: AnyFamily) -> str:
    return f"{family.name}_total" if family.kind == "counter" else family.name


def _values(family: Family) -> Iterator[str]:
    name = _counter_name(family)
    for labels, value in family.series.items():
        yield f"{name}{{{_inside(family.labels, labels)}}} {value!r}" if labels else f"{name} {value!r}"


def _buckets(family: HistogramFamily) -> Iterator[str]:
    """Each bucket counts those before it too."""
    for labels, read in family.series.items():
        inside = _inside(family.labels, labels)
        start = f"{family.name}_bucket{{{inside},le="
        bounds = (*map(repr, read.bounds), "+Inf")
        counts = list(accumulate(read.counts))
        yield from [f'{start}"{bound}"}} {count}' for bound, count in zip(bounds, counts, strict=True)]
        yield f"{family.name}_count{{{inside}}} {counts[-1]}"
        yield f"{family.name}_sum{{{inside}}} {read.total!r}"


def _inside(names: Labels, values: Labels) -> str:
    """What stands between the braces."""
    return ",".join(
        f'{name}="{value.translate(_ESCAPED)}"' for name, value in zip(names, values, strict=True)
    )
