"""Drafts are what followed the same tokens before, and hopeless ones are not tried for long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from emlxd.worker.speculation import NGRAM, PromptLookup


def test_a_draft_is_what_followed_last_time() -> None:
    lookup = PromptLookup(4)
    assert lookup.propose([1, 2, 3, 4, 5, 6, 7, 8, 9]) == []
    assert lookup.propose([1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4]) == [5, 6, 7, 8]
    assert lookup.propose([1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 0, 2, 3, 4]) == [0, 2, 3, 4]


def test_pauses_grow_while_nothing_is_gained_and_end_with_a_gain() -> None:
    lookup = PromptLookup(4)
    pauses = []
    for _ in range(8):
        lookup.learn(0)
        pauses.append(0)
        while lookup.resting():
            pauses[-1] += 1
    assert pauses == [4, 8, 16, 32, 64, 128, 128, 128]
    lookup.learn(0)
    lookup.learn(2)
    assert not lookup.resting()
    lookup.learn(0)
    assert [lookup.resting() for _ in range(5)] == [True] * 4 + [False]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60))
def test_drafts_repeat_the_sequence_itself(tokens: list[int]) -> None:
    lookup = PromptLookup(5)
    for length in range(1, len(tokens) + 1):
        known = tokens[:length]
        draft = lookup.propose(known)
        if draft:
            tail = known[-NGRAM:]
            places = [e for e in range(NGRAM, length) if known[e - NGRAM : e] == tail]
            assert draft == known[places[-1] : places[-1] + 5]
        else:
            assert all(known[e - NGRAM : e] != known[-NGRAM:] for e in range(NGRAM, length))
