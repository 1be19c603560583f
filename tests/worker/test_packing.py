"""How texts are packed into steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from emlxd.worker.packing import MAX_TOKENS, pack, padded_length

LIMIT = 512
lengths = st.lists(st.integers(1, LIMIT), max_size=300)


@given(lengths)
def test_every_text_is_in_one_step_that_it_fits(given_lengths: list[int]) -> None:
    packs = pack(given_lengths, LIMIT)
    assert sorted(index for step in packs for index in step.members) == list(range(len(given_lengths)))
    for step in packs:
        assert 0 < len(step.members) <= step.rows
        assert max(given_lengths[index] for index in step.members) <= step.length <= LIMIT
        assert step.rows * step.length <= max(MAX_TOKENS, step.length)


@given(lengths)
def test_little_is_padding(given_lengths: list[int]) -> None:
    """Of the rows a quarter at most, of a row's tokens a third and what rounding to 8 adds."""
    for step in pack(given_lengths, LIMIT):
        assert len(step.members) >= step.rows * 3 / 4
        assert all(given_lengths[index] > step.length * 3 / 4 - 8 for index in step.members)


def test_shapes_are_few() -> None:
    sizes = {padded_length(tokens, LIMIT) for tokens in range(1, LIMIT + 1)}
    assert len(sizes) == 20
    rows = {(s.rows, s.length) for n in range(1, 200) for s in pack([9] * n, LIMIT)}
    assert {count for count, _ in rows} == {1, 2, 4, 8, 16, 32, 64, 128, 256}


def test_a_text_longer_than_a_step_is_alone() -> None:
    assert [(s.members, s.rows, s.length) for s in pack([5000, 6000, 8], 8192)] == [
        ((1,), 1, 6144),
        ((0,), 1, 5120),
        ((2,), 1, 8),
    ]


def test_equal_lengths_make_powers_of_two() -> None:
    assert [(len(s.members), s.rows) for s in pack([9] * 13, LIMIT)] == [(13, 16)]
    assert [(len(s.members), s.rows) for s in pack([9] * 11, LIMIT)] == [(8, 8), (3, 4)]
