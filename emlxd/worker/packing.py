"""Packs texts into steps of few shapes: arithmetic alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

MAX_TOKENS: Final = 4096  # of the steps of one turn, unless a single text is longer
SLACK: Final = 5 / 4  # by which rounding to few shapes may exceed it
_MIN_TOKENS: Final = 256  # a step with fewer is not worth a lane of its own
_SHARED_ROWS: Final = (64, 128)  # tokens of a row that shorter texts share
_MIN_FILLED: Final = 3 / 4  # of a row, less the 8 tokens that its length may be rounded up by

_Texts = list[tuple[int, int]]  # (tokens, place) of each, the shortest first


@dataclass(frozen=True, slots=True)
class Pack:
    """A step: the texts of each row, by their place, and the shape that the rows are padded to."""

    rows: tuple[tuple[int, ...], ...]
    height: int
    length: int

    @property
    def tokens(self) -> int:
        """With padding."""
        return self.height * self.length


def bucket(size: int, least: int) -> int:
    """``size`` rounded up, so that few sizes occur: the first eight multiples of ``least``, then four sizes
    from each doubling to the next.
    """
    step = max(least, 1 << max((size - 1).bit_length() - 3, 0))
    return -(-size // step) * step


def pack(
    lengths: Sequence[int], max_context: int, *, lanes: int = 1, shares_rows: bool = False
) -> list[Pack]:
    """Every text once, the longest first, in steps of about equal size.

    The device computes ``lanes`` steps side by side, which is a turn. A row has one text, about as long as
    the others of its step; or, where the model ``shares_rows``, the longest that is left and what fits beside
    it.
    """
    left = sorted((length, place) for place, length in enumerate(lengths))
    budget = _budget(sum(lengths), lanes)
    packs = []
    while left:
        least = bucket(left[-1][0], 8)
        wanted = {least, *(size for size in _SHARED_ROWS if size > least)} if shares_rows else {least}
        fill = _fill_shared if shares_rows else _fill
        tried = [fill(left, min(length, max_context), budget) for length in sorted(wanted)]
        best = min(tried, key=lambda step: _cost(step, lengths))
        taken = {place for row in best.rows for place in row}
        left = [text for text in left if text[1] not in taken]
        packs.append(best)
    return packs


def turns(steps: Sequence[Pack], lanes: int) -> Iterator[Sequence[Pack]]:
    """What is computed side by side: ``lanes`` steps, or fewer where texts are long."""
    turn: list[Pack] = []
    for step in steps:
        tokens = sum(one.tokens for one in (*turn, step))
        if turn and (len(turn) == lanes or tokens > MAX_TOKENS * SLACK):
            yield turn
            turn = []
        turn.append(step)
    if turn:
        yield turn


def _cost(step: Pack, lengths: Sequence[int]) -> float:
    """What a step costs for each token of its texts.

    Padding makes it more, and so do long rows: attention looks at all of a row.
    """
    tokens = sum(lengths[place] for row in step.rows for place in row)
    return step.height * step.length * (1 + step.length / 1024) / tokens


def _budget(tokens: int, lanes: int) -> int:
    """How large a step should be: all ``tokens``, and a sixteenth more, in equal parts over whole turns."""
    most = MAX_TOKENS // lanes
    turns = max(-(-tokens // (most * lanes)), 1)
    return min(most, max(_MIN_TOKENS, tokens * 17 // (16 * turns * lanes)))


def _fill(left: _Texts, length: int, budget: int) -> Pack:
    """One text in a row."""
    most = bucket(max(budget // length, 1), 1)
    fit = [
        place for tokens, place in left[-most:] if tokens > length * _MIN_FILLED - 8 or tokens == left[-1][0]
    ]
    return Pack(tuple((place,) for place in reversed(fit)), bucket(len(fit), 1), length)


def _fill_shared(left: _Texts, length: int, budget: int) -> Pack:
    """Each row has the longest text that is left, then the longest that still fits, and so on."""
    most = bucket(max(budget // length, 1), 1)
    left, rows = left.copy(), list[tuple[int, ...]]()
    while left and len(rows) < most:
        row, room = list[int](), length
        while at := bisect_left(left, (room + 1, 0)):
            tokens, place = left.pop(at - 1)
            row.append(place)
            room -= tokens
        rows.append(tuple(row))
    return Pack(tuple(rows), bucket(len(rows), 1), length)
