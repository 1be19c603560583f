"""The whole chain for one answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from emlxd.core import Chunking
from emlxd.text.output import OutputText
from tests.text.vocabularies import bpe

_BPE = bpe()


def run(text: str, stop: tuple[str, ...] = (), chunking: Chunking = "word") -> tuple[list[str], str | None]:
    output = OutputText(_BPE, stop=stop, chunking=chunking)
    sent = [output.push(id) for id in _BPE.encode(text)]
    return [piece for piece in [*sent, output.finish()] if piece], output.stopped


def test_words() -> None:
    assert run("hello world, hello") == (["hello", " world, ", "hello"], None)


def test_tokens() -> None:
    assert run("hello world,", chunking="token") == (["hello", " world", ","], None)


def test_word_is_sent_when_a_stop_string_ends_the_text() -> None:
    assert run("hello world!STOP and more", ("STOP",)) == (["hello", " world!"], "STOP")


def test_nothing_is_left_after_a_stop_string() -> None:
    output = OutputText(_BPE, stop=("!",))
    hello, mark = _BPE.encode("hello!")
    assert [output.push(id) for id in (hello, mark, hello)] == ["", "hello", ""]
    assert output.finish() == ""


def test_stop_string_at_the_very_end() -> None:
    assert run("hello\n", ("\n",)) == (["hello"], "\n")


def test_beginning_of_a_stop_string_is_sent_at_the_end() -> None:
    assert run("hello ST", ("STOP",)) == (["hello ", "ST"], None)


def test_unfinished_character_is_sent_at_the_end() -> None:
    output = OutputText(_BPE)
    assert [output.push(id) for id in (ord("a"), "ř".encode()[0])] == ["", ""]
    assert output.finish() == "a\ufffd"


def test_special_tokens_are_not_text() -> None:
    assert run("hello<|im_end|>") == (["hello"], None)


@given(
    st.text(st.sampled_from("hello world\n 你😀.X")),
    st.lists(st.text(st.sampled_from("lo X\n你"), min_size=1, max_size=3), max_size=2).map(tuple),
    st.sampled_from(["word", "token"]),
)
def test_text_up_to_the_stop_string(text: str, stop: tuple[str, ...], chunking: Chunking) -> None:
    sent, stopped = run(text, stop, chunking)
    ends = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    if ends:
        end, length, first = min(ends)
        assert ("".join(sent), stopped) == (text[: end + length], first)
    else:
        assert ("".join(sent), stopped) == (text, None)
