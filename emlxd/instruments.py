"""What is counted and how it was distributed: the values behind every metric.

One thread writes an instrument, any thread may read it at any time: a reading may be a moment behind, and
never blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from emlxd.core import Distribution

Labels = tuple[str, ...]


class Histogram:
    """Counts values by the first of ``bounds`` that they do not exceed."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with all its series, each under the values of ``labels``. ``help`` is one line.

    ``name`` is without the ``_total`` of a counter.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: Labels
    series: Mapping[Labels, float]


@dataclass(frozen=True, slots=True)
class HistogramFamily:
    """A histogram with all its series. It has a label at least."""

    kind: ClassVar = "histogram"

    name: str
    help: str
    labels: Labels
    series: Mapping[Labels, Distribution]


AnyFamily = Family | HistogramFamily


class LabelledHistogram:
    """A histogram with a series for each combination of label values that was observed."""

    def __init__(self, name: str, help: str, labels: Labels, bounds: Sequence[float]) -> None:
        self._name = name
        self._help = help
        self._labels = labels
        self._series: defaultdict[Labels, Histogram] = defaultdict(partial(Histogram, bounds))

    def observe(self, value: float, *labels: str) -> None:
        self._series[labels].observe(value)

    def read(self) -> HistogramFamily:
        series = {labels: histogram.read() for labels, histogram in self._series.items()}
        return HistogramFamily(self._name, self._help, self._labels, series)
