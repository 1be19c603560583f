"""Stop strings across any borders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emlxd.text.stop import StopMatcher


def naive(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Look for an end after every character."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(parts: list[str], stops: tuple[str, ...]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    released = [*map(matcher.push, parts), matcher.flush()]
    return released, matcher.matched


letters = st.text(alphabet="abc", max_size=5)


@given(
    parts=st.lists(letters, max_size=8),
    stops=st.lists(letters.filter(bool), max_size=4).map(tuple),
)
def test_same_as_looking_after_every_character(parts: list[str], stops: tuple[str, ...]) -> None:
    released, matched = run(parts, stops)
    assert ("".join(released), matched) == naive("".join(parts), stops)


@given(text=letters, stop=letters.filter(bool), data=st.data())
def test_every_split_is_alike(text: str, stop: str, data: st.DataObject) -> None:
    whole = text + stop + text
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert "".join(run(parts, (stop,))[0]) == naive(whole, (stop,))[0]


@pytest.mark.parametrize(
    ("parts", "stops", "released", "matched"),
    [
        (["abc"], (), ["abc", ""], None),
        (["ab", "cd"], ("bc",), ["a", "", ""], "bc"),
        (["ab", "d"], ("bc",), ["a", "bd", ""], None),
        (["ab"], ("bc",), ["a", "b"], None),
        (["xabc"], ("abcd", "bc"), ["xa", ""], "bc"),
        (["xabc"], ("bc", "abc"), ["x", ""], "abc"),
        (["abX", "Xab"], ("X", "ab"), ["", "", ""], "ab"),
        (["aa", "ab"], ("aab",), ["", "a", ""], "aab"),
    ],
)
def test_examples(parts: list[str], stops: tuple[str, ...], released: list[str], matched: str | None) -> None:
    assert run(parts, stops) == (released, matched)


def test_holds_back_no_more_than_it_must() -> None:
    matcher = StopMatcher(("\n\nUser:",))
    assert matcher.push("Hi\n") == "Hi"
    assert matcher.push("there\n\nU") == "\nthere"
    assert matcher.push("nited") == "\n\nUnited"
