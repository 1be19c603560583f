"""The positions of a decode step."""

from __future__ import annotations

import mlx.core as mx
from hypothesis import given
from hypothesis import strategies as st

from emlxd.graph.step_positions import StepPositions

ROW = st.tuples(st.integers(0, 9), st.integers(0, 1))


STEP = st.tuples(st.lists(ROW, min_size=1, max_size=3) | st.none(), st.booleans())


@given(st.lists(STEP, max_size=12))
def test_arrays_are_those_that_were_asked_for(steps: list[tuple[list[tuple[int, int]] | None, bool]]) -> None:
    positions = StepPositions()
    at, lengths = [5, 0], [1, 0]
    for rows, advances in steps:  # None: all rows go on
        if rows is not None:
            at, lengths = [row[0] for row in rows], [row[1] for row in rows]
        found = positions.arrays(list(at), list(lengths))
        assert [array.tolist() for array in found] == [at, lengths]
        assert all(array.dtype == mx.int32 for array in found)
        if advances:
            positions.advance(found[0] + found[1])
        at = [position + length for position, length in zip(at, lengths, strict=True)]


def test_rows_that_go_on_take_what_the_device_has() -> None:
    positions = StepPositions()
    first, lengths = positions.arrays([7, 31], [1, 0])
    after = first + lengths
    positions.advance(after)
    second, same = positions.arrays([8, 31], [1, 0])
    assert second is after
    assert same is lengths
    positions.advance(second + lengths)
    assert positions.arrays([8, 31], [1, 0])[0] is not second


def test_a_step_that_did_not_advance_leaves_nothing_to_go_on_from() -> None:
    positions = StepPositions()
    at, lengths = positions.arrays([7], [1])
    positions.advance(at + lengths)
    positions.arrays([8], [1])
    assert positions.arrays([9], [1])[0].tolist() == [9]
