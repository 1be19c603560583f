"""What would crash or hang who compiles it does so in a process of its own, and is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLMatcher

from emlxd.errors import RequestError
from emlxd.text.grammar import GrammarCompiler, json_schema_grammar, lark_grammar
from emlxd.text.grammar_guard import GrammarGuard
from tests.text.test_answer import MARKED

DEEP = "start: a0\n" + "\n".join(f'a{i}: a{i + 1} | "x"' for i in range(4000)) + '\na4000: "y"'
ENDLESS = "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}/" for i in range(1, 40))
LARGE = "start: " + " ".join(f'("a" "b"){{1,{i}}}' for i in range(2, 3000))


@pytest.fixture
def guard() -> Iterator[GrammarGuard]:
    guard = GrammarGuard(seconds=5)
    yield guard
    guard.close()


def test_grammars_stand_whatever_came_before(guard: GrammarGuard) -> None:
    lark = LLMatcher.grammar_from_lark
    assert guard.stands(lark('start: "a" <[151645]> "b"'))
    assert not guard.stands(lark(DEEP))
    assert guard.stands(lark("start: /[a-z]+/"))
    assert not guard.stands(lark(ENDLESS))
    assert guard.stands(lark('start: "a"'))


def test_a_guard_that_was_closed_comes_back(guard: GrammarGuard) -> None:
    guard.close()
    assert guard.stands(LLMatcher.grammar_from_lark('start: "a"'))
    guard.close()
    assert guard.stands(LLMatcher.grammar_from_lark('start: "a"'))


def chain(length: int) -> dict[str, Any]:
    """A schema whose references lead from one to the next."""
    names = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"type": "integer"}]} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": names | {f"a{length}": {"type": "null"}}}


def test_what_nests_too_deep_is_refused() -> None:
    compiler = GrammarCompiler(MARKED, MARKED.vocab_size)
    compiler.matcher(json_schema_grammar(chain(100), "response_format"))
    for grammar in (lark_grammar(DEEP, "grammar"), json_schema_grammar(chain(2500), "response_format")):
        with pytest.raises(RequestError, match="takes too long, or too much memory") as caught:
            compiler.matcher(grammar)
        assert caught.value.param == grammar.param


def test_a_panic_is_told_without_its_inside() -> None:
    with pytest.raises(RequestError, match="too large") as caught:
        GrammarCompiler(MARKED, MARKED.vocab_size).matcher(lark_grammar(LARGE, "grammar"))
    assert "panic" not in caught.value.message
