"""From tokens to pieces: words, stop strings, thinking, calls, log-probabilities, and what may come next."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emlxd.core import (
    Chunking,
    GenerateRequest,
    Grammar,
    SamplingParams,
    Shape,
    TextPiece,
    Thinking,
    TokenLogprob,
    Tool,
    ToolCallPiece,
)
from emlxd.text.answer import Answer, Piece
from emlxd.text.grammar import GrammarCompiler
from emlxd.text.tokenizer import Tokenizer
from emlxd.text.tools.table import FORMATS
from tests.text.vocabularies import bpe, bpe_metadata, spm
from tests.text.walk import allowed, pick

_BPE = bpe()
_MARKS = ["</think>", *FORMATS["hermes"].markers, *FORMATS["harmony"].markers, "[TOOL_CALLS]"]


def _marked() -> Tokenizer:
    metadata = bpe_metadata()
    metadata["tokenizer.ggml.tokens"] += _MARKS
    metadata["tokenizer.ggml.token_type"] += [3] * len(_MARKS)
    return Tokenizer.from_gguf(metadata)


MARKED = _marked()
COMPILER = GrammarCompiler(MARKED, MARKED.vocab_size)
NUMBER = Grammar("regex", "[0-9]{1,3}", "regex")
NOW = Tool("now", {"type": "object", "properties": {"zone": {"type": "integer"}}, "required": ["zone"]})
THINK = Thinking("<think>", "</think>")


def answer(
    shape: Shape = Shape(),  # noqa: B008
    *,
    tokenizer: Tokenizer = MARKED,
    stop: tuple[str, ...] = (),
    chunking: Chunking = "word",
    logprobs: int | None = None,
) -> Answer:
    request = GenerateRequest(
        "r", (1,), 100, SamplingParams(logprobs=logprobs), stop, chunking=chunking, shape=shape
    )
    return Answer(tokenizer, request, COMPILER.matcher, mask_bytes=COMPILER.mask_bytes)


def calls_grammar(format: str, *tools: Tool, parallel: bool = True) -> Grammar:
    def mark(text: str) -> str:
        return f"<[{MARKED.id_of(text)}]>"

    return Grammar("lark", f"start: calls\n{FORMATS[format].rules(tools, mark, parallel=parallel)}", "tools")


def encode(text: str, tokenizer: Tokenizer = MARKED) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def run(text: str, target: Answer, tokenizer: Tokenizer = MARKED) -> list[Piece]:
    pieces = [piece for id in encode(text, tokenizer) for piece in target.push(id)]
    return [*pieces, *target.finish()]


def texts(pieces: Iterable[Piece], channel: str = "content") -> str:
    spoken = [piece for piece in pieces if isinstance(piece, TextPiece)]
    return "".join(piece.text for piece in spoken if piece.channel == channel)


def calls(pieces: Iterable[Piece]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, ToolCallPiece):
            if piece.name is not None:
                assert piece.id
                found.append((piece.name, ""))
            found[piece.call] = (found[piece.call][0], found[piece.call][1] + piece.arguments)
    return found


def sent(text: str, stop: tuple[str, ...] = (), chunking: Chunking = "word") -> tuple[list[str], str | None]:
    target = answer(tokenizer=_BPE, stop=stop, chunking=chunking)
    pieces = run(text, target, _BPE)
    return [piece.text for piece in pieces if isinstance(piece, TextPiece)], target.stopped


def test_words() -> None:
    assert sent("hello world, hello") == (["hello", " world, ", "hello"], None)


def test_tokens() -> None:
    assert sent("hello world,", chunking="token") == (["hello", " world", ","], None)


def test_word_is_sent_when_a_stop_string_ends_the_text() -> None:
    assert sent("hello world!STOP and more", ("STOP",)) == (["hello", " world!"], "STOP")


def test_nothing_is_left_after_a_stop_string() -> None:
    target = answer(tokenizer=_BPE, stop=("!",))
    hello, mark = encode("hello!", _BPE)
    assert [texts(target.push(id)) for id in (hello, mark, hello)] == ["", "hello", ""]
    assert target.finish() == []


def test_stop_string_at_the_very_end() -> None:
    assert sent("hello\n", ("\n",)) == (["hello"], "\n")


def test_beginning_of_a_stop_string_is_sent_at_the_end() -> None:
    assert sent("hello ST", ("STOP",)) == (["hello ", "ST"], None)


def test_unfinished_character_is_sent_at_the_end() -> None:
    target = answer(tokenizer=_BPE)
    assert [target.push(id) for id in (ord("a"), "ř".encode()[0])] == [[], []]
    assert texts(target.finish()) == "a\ufffd"


def test_special_tokens_are_not_text() -> None:
    assert sent("hello<|im_end|>") == (["hello"], None)
    assert texts(run("a<|im_end|><tool_call>b", answer())) == "ab"


@given(
    st.text(st.sampled_from("hello world\n 你😀.X")),
    st.lists(st.text(st.sampled_from("lo X\n你"), min_size=1, max_size=3), max_size=2).map(tuple),
    st.sampled_from(["word", "token"]),
)
def test_text_up_to_the_stop_string(text: str, stop: tuple[str, ...], chunking: Chunking) -> None:
    got, stopped = sent(text, stop, chunking)
    ends = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    if ends:
        end, length, first = min(ends)
        assert ("".join(got), stopped) == (text[: end + length], first)
    else:
        assert ("".join(got), stopped) == (text, None)


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "content"),
    [
        ("undecided", "<think>\nhm, hello\n</think>\n\nhello world", "hm, hello", "hello world"),
        ("undecided", "\n<think>a</think>b", "a", "b"),
        ("undecided", "hello <think>a</think>", "", "hello <think>a</think>"),
        ("open", "\nhm\n\nhm\n</think>\n\nb", "hm\n\nhm", "b"),
        ("open", "a</think>b</think>", "a", "b</think>"),
        ("open", "cut off\n", "cut off", ""),
        ("closed", "<think>b", "", "<think>b"),
        ("open", "</think>", "", ""),
    ],
)
def test_thinking_and_content(start: str, text: str, reasoning: str, content: str) -> None:
    thinking = Thinking("<think>", "</think>", start)  # type: ignore[arg-type]
    pieces = run(text, answer(Shape(thinking=thinking)))
    assert (texts(pieces, "reasoning"), texts(pieces)) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>thought\na</think>b", "a", "b"),
        ("<think>thought\n</think>\nb", "", "b"),
        ("<think>though</think>b", "though", "b"),
        ("thought", "", "thought"),
    ],
)
def test_the_label_of_thinking_is_no_thought(text: str, reasoning: str, content: str) -> None:
    pieces = run(text, answer(Shape(thinking=Thinking("<think>", "</think>", label="thought"))))
    assert (texts(pieces, "reasoning"), texts(pieces)) == (reasoning, content)


def test_thinking_is_sent_before_content() -> None:
    pieces = run("<think>hello world</think>hello", answer(Shape(thinking=THINK)))
    assert [(p.text, p.channel) for p in pieces if isinstance(p, TextPiece)] == [
        ("hello", "reasoning"),
        (" world", "reasoning"),
        ("hello", "content"),
    ]


def test_stop_strings_do_not_end_thinking() -> None:
    target = answer(Shape(thinking=THINK), stop=("X",))
    pieces = run("<think>aXb</think>cXd", target)
    assert (texts(pieces, "reasoning"), texts(pieces), target.stopped) == ("aXb", "c", "X")


def test_reasoning_tokens_are_counted() -> None:
    target = answer(Shape(thinking=THINK))
    run("<think>hello world</think>hello", target)
    assert target.reasoning_tokens == 4


def test_budget_ends_the_thinking() -> None:
    target = answer(Shape(thinking=THINK, max_reasoning_tokens=3))
    assert target.guarded
    for id in encode("<think>hello world"):
        assert target.mask() is None
        target.push(id)
    forced = ""
    while (mask := target.mask()) is not None:
        (id,) = allowed(mask)
        forced += MARKED.token_bytes(id).decode()
        target.push(id)
    assert forced == "\n</think>\n\n"
    assert texts(target.push(ord("a")) + target.finish()) == "a"


def test_no_thinking_at_all_with_a_budget_of_nothing() -> None:
    target = answer(Shape(thinking=Thinking("<think>", "</think>", "open"), max_reasoning_tokens=0))
    assert allowed(target.mask() or b"") == [ord("\n")]


def test_budget_ends_harmony_thinking() -> None:
    target = answer(Shape(call_format="harmony", max_reasoning_tokens=2))
    for id in encode("<|channel|>analysis<|message|>a b"):
        assert target.mask() is None or target.reasoning_tokens >= 2
        target.push(id)
    assert allowed(target.mask() or b"") == [MARKED.id_of("<|end|>")]


def test_grammar_from_the_start() -> None:
    target = answer(Shape(grammar=NUMBER))
    assert {chr(id) for id in allowed(target.mask() or b"")} == set("0123456789")
    for id in encode("123"):
        assert not target.complete
        target.push(id)
    assert target.complete


def test_grammar_starts_after_the_thinking() -> None:
    target = answer(Shape(thinking=Thinking("<think>", "</think>", "open"), grammar=NUMBER))
    for id in encode("hello"):
        assert target.mask() is None
        target.push(id)
    target.push(encode("</think>")[0])
    assert {chr(id) for id in allowed(target.mask() or b"")} == set("0123456789")


def test_model_may_choose_to_think_before_a_grammar() -> None:
    shape = Shape(thinking=THINK, grammar=NUMBER)
    think = encode("<think>")[0]
    thinks, answers = answer(shape), answer(shape)
    assert think in allowed(thinks.mask() or b"")
    thinks.push(think)
    assert thinks.mask() is None
    answers.push(ord("1"))
    assert think not in allowed(answers.mask() or b"")


def test_budget_with_a_grammar() -> None:
    shape = Shape(thinking=Thinking("<think>", "</think>", "open"), grammar=NUMBER, max_reasoning_tokens=1)
    target = answer(shape)
    target.push(ord("a"))
    for mark in ("\n", "</think>"):
        assert allowed(target.mask() or b"") == encode(mark)
        target.push(encode(mark)[0])
    assert not target.complete
    target.push(ord("7"))
    assert texts(target.finish()) == "7"


CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": 3}}\n</tool_call>'


def test_calls_and_text() -> None:
    target = answer(Shape(call_format="hermes", tools=(NOW,)))
    pieces = run(f"hello\n{CALL}", target)
    assert (texts(pieces), calls(pieces), target.called) == ("hello", [("now", '{"zone": 3}')], True)


def test_thinking_before_calls() -> None:
    shape = Shape(thinking=THINK, call_format="hermes", tools=(NOW,))
    pieces = run(f"<think>hm</think>\n{CALL}", answer(shape))
    assert (texts(pieces, "reasoning"), texts(pieces), calls(pieces)) == ("hm", "", [("now", '{"zone": 3}')])


def test_stop_strings_do_not_cut_calls() -> None:
    target = answer(Shape(call_format="hermes", tools=(NOW,)), stop=("\n",))
    assert calls(run(CALL, target)) == [("now", '{"zone": 3}')]


def test_answer_is_complete_after_its_only_call() -> None:
    target = answer(Shape(call_format="hermes", tools=(NOW,), parallel_calls=False))
    for id in encode(CALL):
        assert not target.complete
        target.push(id)
    assert target.complete


def _auto() -> Shape:
    return Shape(call_format="hermes", tools=(NOW,), call_grammar=calls_grammar("hermes", NOW))


def test_free_until_a_call_begins_and_then_held() -> None:
    target = answer(_auto())
    for id in encode("hello "):
        assert target.mask() is None
        target.push(id)
    target.push(encode("<tool_call>")[0])
    assert allowed(target.mask() or b"") == [ord("\n")]


def test_held_call_streams_its_arguments() -> None:
    target = answer(_auto())
    text = f"hello {CALL}"
    steps = [target.push(id) for id in encode(text)]
    arguments = [p.arguments for step in steps for p in step if isinstance(p, ToolCallPiece)]
    assert len(arguments) > 5
    assert "".join(arguments) == '{"zone": 3}'


def test_call_that_does_not_fit_its_grammar_is_read_without_it() -> None:
    tokenizer = Tokenizer.from_gguf(bpe_metadata((">{",)))
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    rules = FORMATS["hermes"].rules([NOW], json.dumps, parallel=True)
    shape = replace(_auto(), call_grammar=Grammar("lark", f"start: calls\n{rules}", "tools"))
    target = Answer(tokenizer, GenerateRequest("r", (1,), 100, shape=shape), compiler.matcher)
    text = '<tool_call>{"name": "now", "arguments": {"zone": "x"}}</tool_call>'
    assert calls(run(text, target, tokenizer)) == [("now", '{"zone": "x"}')]


@pytest.mark.parametrize("format", ["hermes", "harmony"])
def test_required_calls_are_made_whatever_the_model_likes(format: str) -> None:
    shape = Shape(call_format=format, tools=(NOW,), grammar=calls_grammar(format, NOW, parallel=False))
    finished = 0
    for seed in range(10):
        target, choose, pieces = answer(shape), pick(seed, MARKED), []
        for _ in range(300):
            if target.complete:
                break
            token = choose(target.mask() or b"")
            if token in MARKED.eos_ids:
                break
            pieces += target.push(token)
        else:
            continue
        finished += 1
        ((name, arguments),) = calls(pieces + target.finish())
        assert name == "now"
        jsonschema.validate(json.loads(arguments), NOW.parameters)
        assert texts(pieces) == ""
    assert finished


def _logprob(id: int) -> TokenLogprob:
    return TokenLogprob(id, -0.5)


def scored(text: str, target: Answer) -> list[tuple[str, str]]:
    """Each piece of content with the text of the tokens that it has log-probabilities of."""
    pieces = [piece for id in encode(text) for piece in target.push(id, _logprob(id))]
    pieces += target.finish(cut=True)
    return [
        (piece.text, b"".join(MARKED.token_bytes(found.token) for found in piece.logprobs).decode())
        for piece in pieces
        if isinstance(piece, TextPiece) and piece.channel == "content"
    ]


@given(st.text(st.sampled_from("hello world\n 你😀.")), st.sampled_from(["word", "token"]))
def test_logprobs_cover_the_tokens_that_end_within_the_text(text: str, chunking: Chunking) -> None:
    pieces = scored(text, answer(logprobs=0, chunking=chunking))
    for end in range(len(pieces) + 1):
        said = "".join(piece for piece, _ in pieces[:end])
        covered = "".join(tokens for _, tokens in pieces[:end])
        assert said.startswith(covered)
        assert end < len(pieces) or said == covered == text


def test_logprobs_are_of_content_alone() -> None:
    shape = Shape(thinking=THINK, call_format="hermes", tools=(NOW,))
    pieces = scored(f"<think>hello</think>\nhello world\n{CALL}", answer(shape, logprobs=0))
    assert pieces == [("hello", "hello"), (" world", " world")]


def test_no_logprobs_of_a_stop_string() -> None:
    assert scored("hello!X", answer(stop=("!X",), logprobs=0)) == [("hello", "hello")]


def test_no_logprobs_unless_asked_for() -> None:
    assert scored("hello", answer()) == [("hello", "")]


def test_an_answer_that_goes_on_keeps_its_first_space() -> None:
    tokenizer = spm()
    hello, world = (tokenizer.id_of(token) for token in ("▁hello", "▁world"))
    assert hello is not None and world is not None
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    for continues, expected in ((True, " world"), (False, "world")):
        request = GenerateRequest("r", (hello,), 9, continues=continues)
        target = Answer(tokenizer, request, compiler.matcher)
        pieces = [*target.push(world), *target.finish()]
        assert "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)) == expected
