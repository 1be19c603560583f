"""Packs texts by length into steps of few shapes: arithmetic alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MAX_TOKENS: Final = 4096  # of one step, padding included, unless a single text is longer
_MIN_FILLED: Final = 3 / 4  # of a step's rows, and of a row's tokens but for the last bucket's rounding


@dataclass(frozen=True, slots=True)
class Pack:
    """A step: which texts, by their place, and the shape that they are padded to."""

    members: tuple[int, ...]
    rows: int
    length: int


def padded_length(tokens: int, max_context: int) -> int:
    """Eight sizes up to 64 tokens and four to each doubling from there: few shapes, little padding."""
    step = max(8, 1 << max((tokens - 1).bit_length() - 3, 0))
    return min(-(-tokens // step) * step, max_context)


def pack(lengths: Sequence[int], max_context: int) -> list[Pack]:
    """Every text once, the longest first. Texts in one step are about equally long."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    packs = []
    start = 0
    while start < len(order):
        length = padded_length(lengths[order[start]], max_context)
        most = 1 << (max(MAX_TOKENS // length, 1).bit_length() - 1)
        fit = 1
        while fit < min(most, len(order) - start) and lengths[order[start + fit]] > length * _MIN_FILLED - 8:
            fit += 1
        rows = _rows(fit)
        packs.append(Pack(tuple(order[start : start + min(fit, rows)]), rows, length))
        start += min(fit, rows)
    return packs


def _rows(texts: int) -> int:
    """The power of two above if it is filled well, otherwise the one below."""
    above = 1 << (texts - 1).bit_length()
    return above if texts >= above * _MIN_FILLED else above // 2
