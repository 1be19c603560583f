"""Chunks of whole words."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from emlxd.text.words import WordChunker


def chunks(parts: list[str]) -> list[str]:
    chunker = WordChunker()
    return [chunk for chunk in [*map(chunker.push, parts), chunker.flush()] if chunk]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["Hel", "lo", " wor", "ld", "!"], ["Hello", " world!"]),
        (["Hello ", "wor", "ld "], ["Hello ", "world "]),
        (["don", "'", "t", " pay", " 3", ".", "14"], ["don't", " pay", " 3.14"]),
        (["př", "íliš", " žlu", "ťoučký"], ["příliš", " žluťoučký"]),
        (["a", "\n", "b", "\n\n", "c"], ["a\n", "b\n\n", "c"]),
        (["你好", "世界"], ["你", "好世", "界"]),
        (["日本", "語", "。", "Hi"], ["日", "本", "語", "。", "Hi"]),
        (["สวัสดี"], ["สวัส", "ดี"]),
        (["x", "\r", "\n", "y"], ["x", "\r\n", "y"]),
    ],
)
def test_examples(parts: list[str], expected: list[str]) -> None:
    assert chunks(parts) == expected


_LONG_RUNS = [("x" * length, "y" * 30) for length in range(20, 50)]


@pytest.mark.parametrize(
    "cluster",
    [
        "e\u0301",
        "👩\u200d💻",
        "❤\ufe0f",
        "👍🏽",
        "🇨🇿",
        "ที่",
        "\u30ab\u3099",
        "1\ufe0f\u20e3",
        "葛\U000e0100",
        "क\u094d\u200dष",
        "\r\n",
    ],
)
def test_clusters_are_not_cut(cluster: str) -> None:
    for before, after in [("", cluster), ("a ", " b"), ("好", "好"), *_LONG_RUNS]:
        text = before + cluster + after
        ends = set(accumulate(map(len, chunks(list(text)))))
        inside = range(len(before) + 1, len(before) + len(cluster))
        assert ends.isdisjoint(inside)


def test_long_runs_are_released() -> None:
    chunker = WordChunker()
    held = most = 0
    for _ in range(1000):
        held += 2 - len(chunker.push("ab"))
        most = max(most, held)
    assert most <= 24


def test_endless_marks_are_released() -> None:
    chunker = WordChunker()
    assert sum(len(chunker.push("\u0301")) for _ in range(1000)) > 900


@given(st.lists(st.text(st.one_of(st.characters(), st.sampled_from(" \r\n\u200d\u0301👩💻🇨ก็好a")))))
def test_nothing_is_lost(parts: list[str]) -> None:
    assert "".join(chunks(parts)) == "".join(parts)


@given(st.lists(st.text(st.sampled_from("ab,é. \n"), max_size=4)))
def test_short_words_are_never_cut(parts: list[str]) -> None:
    """Every cut has white space on one of its sides."""
    words = "".join(parts).split()
    assume(all(len(word) < 16 for word in words))
    assert [word for chunk in chunks(parts) for word in chunk.split()] == words


@given(st.lists(st.text(st.sampled_from("ab,.- \r\n\t\v\f\x1c\x1f\x85"), max_size=6)))
def test_letters_of_ascii_are_cut_like_others(parts: list[str]) -> None:
    others = str.maketrans("ab", "éß")
    one, other = WordChunker(), WordChunker()
    assert [len(one.push(part)) for part in parts] == [
        len(other.push(part.translate(others))) for part in parts
    ]


@given(st.text(st.sampled_from("你好世界日本語"), min_size=1))
def test_scripts_without_spaces_lag_by_one_character(text: str) -> None:
    chunker = WordChunker()
    sent = ""
    for index, character in enumerate(text):
        sent += chunker.push(character)
        assert len(sent) == index
