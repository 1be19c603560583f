"""How texts are packed into steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emlxd.worker.packing import MAX_TOKENS, bucket, pack

LIMIT = 512
lengths = st.lists(st.integers(1, LIMIT), max_size=300)
lanes = st.integers(1, 5)


@given(lengths, lanes, st.booleans())
def test_every_text_is_in_one_step_that_it_fits(texts: list[int], lanes: int, shares_rows: bool) -> None:
    packs = pack(texts, LIMIT, lanes=lanes, shares_rows=shares_rows)
    assert sorted(place for step in packs for row in step.rows for place in row) == list(range(len(texts)))
    for step in packs:
        assert 0 < len(step.rows) <= step.height
        assert all(0 < sum(texts[place] for place in row) <= step.length <= LIMIT for row in step.rows)
        assert shares_rows or all(len(row) == 1 for row in step.rows)
        assert step.height * step.length <= max(MAX_TOKENS // lanes * 5 / 4, step.length)


@given(lengths)
def test_little_is_padding(texts: list[int]) -> None:
    """Of the rows a fifth at most, of a row's tokens a quarter and what rounding to 8 adds."""
    for step in pack(texts, LIMIT):
        assert len(step.rows) >= step.height * 4 / 5
        assert all(texts[place] > step.length * 3 / 4 - 8 for (place,) in step.rows)


def test_next_to_nothing_is_padding_where_rows_are_shared() -> None:
    texts = [3 + n * 37 % 90 for n in range(256)]
    packs = pack(texts, LIMIT, lanes=2, shares_rows=True)
    assert sum(step.height * step.length for step in packs) < 1.06 * sum(texts)


@pytest.mark.parametrize("texts", [[23] * 256, [3 + n * 37 % 90 for n in range(256)]])
def test_the_steps_of_a_turn_are_about_equally_long(texts: list[int]) -> None:
    sizes = [step.height * step.length for step in pack(texts, LIMIT, lanes=2, shares_rows=True)]
    assert len(sizes) % 2 == 0
    pairs = zip(sizes[0:-2:2], sizes[1:-2:2], strict=True)
    assert all(max(pair) <= 1.25 * min(pair) for pair in pairs)


def test_shapes_are_few() -> None:
    sizes = {bucket(tokens, 8) for tokens in range(1, LIMIT + 1)}
    assert len(sizes) == 20
    heights = {step.height for n in range(1, 200) for step in pack([9] * n, LIMIT)}
    assert heights <= {*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8)} | {
        *range(80, 129, 16),
        *range(160, 257, 32),
    }


def test_a_text_longer_than_a_step_is_alone() -> None:
    assert [(s.rows, s.height, s.length) for s in pack([5000, 6000, 8], 8192)] == [
        (((1,),), 1, 6144),
        (((0,),), 1, 5120),
        (((2,),), 1, 8),
    ]


def test_a_row_is_as_short_as_its_texts_allow() -> None:
    packs = [pack(texts, LIMIT, shares_rows=True) for texts in ([12], [70], [9, 9], [60, 4])]
    assert [[(s.height, s.length) for s in steps] for steps in packs] == [
        [(1, 16)],
        [(1, 80)],
        [(2, 16)],
        [(1, 64)],
    ]
