"""Both formats, read back by the parsers of Prometheus' own client."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from emlxd.core import Distribution
from emlxd.exposition import OPENMETRICS, TEXT, Format, asked_format, expose
from emlxd.instruments import Family, HistogramFamily

PARSERS: Any = {TEXT: parse_text, OPENMETRICS: parse_openmetrics}
both = pytest.mark.parametrize("format", [TEXT, OPENMETRICS])


def samples(families: list[Any], format: Format) -> dict[tuple[str, tuple[str, ...]], float]:
    """Every sample by its name and label values."""
    found = PARSERS[format](expose(families, format).decode())
    return {(s.name, tuple(s.labels.values())): s.value for family in found for s in family.samples}


@both
@given(
    label=st.text(st.characters(exclude_categories=["Cs"])),
    value=st.one_of(st.floats(allow_nan=False), st.integers(0, 2**53)),
)
def test_any_label_and_value_comes_back(format: Format, label: str, value: float) -> None:
    gauge = Family("g", "gauge", "Some.", ("model", "part"), {(label, "x"): value})
    assert samples([gauge], format) == {("g", (label, "x")): value}


@both
@given(counts=st.lists(st.integers(0, 10**9), min_size=3, max_size=3))
def test_buckets_count_those_before_them(format: Format, counts: list[int]) -> None:
    read = Distribution((0.001, 2.0), tuple(counts), 1.5)
    found = samples([HistogramFamily("h", "Some.", ("model",), {("m",): read})], format)
    assert found == {
        ("h_bucket", ("m", "0.001")): counts[0],
        ("h_bucket", ("m", "2.0")): counts[0] + counts[1],
        ("h_bucket", ("m", "+Inf")): sum(counts),
        ("h_count", ("m",)): sum(counts),
        ("h_sum", ("m",)): 1.5,
    }


@both
def test_types_and_help(format: Format) -> None:
    families: list[Any] = [
        Family("c", "counter", "Count.", (), {(): 3}),
        Family("g", "gauge", "None yet.", ("model",), {}),
        Family("odd", "gauge", "Odd.", ("of",), {("a",): math.inf, ("b",): -math.inf}),
        HistogramFamily("h", "Times.", ("model",), {}),
    ]
    found = {family.name: family for family in PARSERS[format](expose(families, format).decode())}
    told = {name: (family.type, family.documentation) for name, family in found.items()}
    assert told == {
        "c": ("counter", "Count."),
        "g": ("gauge", "None yet."),
        "odd": ("gauge", "Odd."),
        "h": ("histogram", "Times."),
    }
    assert [sample.name for sample in found["c"].samples] == ["c_total"]
    assert [sample.value for sample in found["odd"].samples] == [math.inf, -math.inf]


# What Prometheus 3 sends.
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "format"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/html, */*;q=0.1", TEXT),
        ("application/json", TEXT),
        ("text/plain; version=0.0.4", TEXT),
        ("application/openmetrics-text", OPENMETRICS),
        ("application/openmetrics-text; version=1.0.0", OPENMETRICS),
        ("application/openmetrics-text; version=0.0.1", TEXT),
        ("text/plain;q=0.9, application/openmetrics-text", OPENMETRICS),
        ("application/openmetrics-text;q=0.5, text/plain", TEXT),
        ("application/openmetrics-text;q=0, text/plain;q=0.1", TEXT),
        ("application/openmetrics-text;q=much", TEXT),
        (PROMETHEUS, OPENMETRICS),
    ],
)
def test_the_format_is_the_one_that_is_liked_best(accept: str, format: Format) -> None:
    assert asked_format(accept) == format
