"""From what a request asks for to the shape of its answer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from emlxd.core import GenerateRequest, Grammar, Shape, Tool
from emlxd.errors import RequestError
from emlxd.text.answer import Answer
from emlxd.text.dialect import Dialect, Wishes
from emlxd.text.grammar import (
    GrammarCompiler,
    InvalidGrammar,
    Matcher,
    choice_grammar,
    json_object_grammar,
    regex_grammar,
)
from tests.text.test_answer import COMPILER, MARKED, calls, run, texts
from tests.text.walk import pick

HERMES = "{{ tools }}<tool_call></tool_call><think></think>"
HARMONY = "{{ tools }}<|channel|><|message|>"
ADD = Tool("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
NOW = Tool("now", {})
ANY: dict[str, Any] = {"type": "object"}


def dialect(template: str, **options: Any) -> Dialect:
    return Dialect(template, MARKED, COMPILER, **options)


def answers(shape: Shape, count: int = 12) -> list[tuple[str, list[tuple[str, str]]]]:
    """Content and calls of random answers that come to an end."""
    found = []
    for seed in range(count):
        request = GenerateRequest("r", (1,), 500, shape=shape)
        target = Answer(MARKED, request, COMPILER.matcher, mask_bytes=COMPILER.mask_bytes)
        choose, pieces = pick(seed, MARKED), []
        for _ in range(500):
            mask = target.mask()
            assert mask is not None
            token = choose(mask)
            if token in MARKED.eos_ids:
                break
            pieces += target.push(token)
            if target.complete:
                break
        else:
            continue
        pieces += target.finish()
        found.append((texts(pieces), calls(pieces)))
    assert found
    return found


def test_nothing_is_asked_for() -> None:
    assert dialect("").shape("p", Wishes()) == Shape()


@pytest.mark.parametrize(
    ("prompt", "start"), [("p", "undecided"), ("p<think>\n", "open"), ("p<think>\n\n</think>\n\n", "closed")]
)
def test_thinking_starts_where_the_prompt_ends(prompt: str, start: str) -> None:
    thinking = dialect(HERMES).shape(prompt, Wishes()).thinking
    assert thinking and thinking.start == start


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("<|turn>model\n", "undecided"),
        ("<|turn>model\n<|channel>thought\n", "open"),
        ("<|turn>model\n<|channel>thought\n<channel|>", "closed"),
    ],
)
def test_thinking_of_gemma(prompt: str, start: str) -> None:
    thinking = dialect("{{ tools }}<|channel>thought\n<channel|>").shape(prompt, Wishes()).thinking
    assert thinking and (thinking.open, thinking.label, thinking.start) == ("<|channel>", "thought", start)


def test_no_tools_are_read_when_none_may_be_called() -> None:
    shape = dialect(HERMES).shape("p", Wishes((ADD,), "none"))
    assert (shape.call_format, shape.call_grammar, shape.grammar) == ("", None, None)


def test_auto_holds_calls_alone() -> None:
    shape = dialect("{{ tools }}<tool_call>").shape("p", Wishes((ADD,)))
    assert shape.call_format == "hermes"
    assert shape.grammar is None and shape.call_grammar is not None
    target = Answer(MARKED, GenerateRequest("r", (1,), 99, shape=shape), COMPILER.matcher)
    assert texts(run("hello", target)) == "hello"


@pytest.mark.parametrize("template", ["", "{{ tools }}<tool_call>", HARMONY, "{{ tools }}[TOOL_CALLS]"])
def test_required(template: str) -> None:
    shape = dialect(template).shape("p", Wishes((ADD, NOW), "required", parallel=False))
    for content, ((name, arguments),) in answers(shape):
        assert content == ""
        assert name in ("add", "now")
        assert isinstance(json.loads(arguments), dict)


def test_named() -> None:
    shape = dialect("").shape("p", Wishes((ADD, NOW), named="add"))
    for content, ((name, arguments),) in answers(shape):
        assert (content, name) == ("", "add")
        assert isinstance(json.loads(arguments)["a"], int)


@pytest.mark.parametrize("template", ["", HARMONY])
@pytest.mark.parametrize(
    "grammar",
    [
        json_object_grammar("format"),
        regex_grammar("[ab]{2}", "regex"),
        choice_grammar(["x", "y"], "choice"),
    ],
)
def test_format_of_the_text(template: str, grammar: Grammar) -> None:
    shape = dialect(template).shape("p", Wishes(grammar=grammar))
    for content, found in answers(shape):
        assert found == []
        assert content in ("x", "y") or set(content) <= set("ab") or isinstance(json.loads(content), dict)


@pytest.mark.parametrize("template", ["", HARMONY])
def test_format_of_the_text_or_a_call(template: str) -> None:
    wishes = Wishes((NOW,), grammar=choice_grammar(["x", "y"], "choice"))
    found = answers(dialect(template).shape("p", wishes), 40)
    assert {content for content, _ in found} == {"x", "y", ""}
    assert all(bool(content) != bool(made) for content, made in found)


def test_name_overrides_the_template() -> None:
    shape = dialect(HERMES, call_format="mistral").shape("p", Wishes((ADD,)))
    assert shape.call_format == "mistral"


UNSUPPORTED = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def test_strict_tool_with_an_unsupported_schema_is_refused() -> None:
    with pytest.raises(RequestError) as error:
        dialect("").shape("p", Wishes((Tool("f", UNSUPPORTED, strict=True, param="tools[0].x"),)))
    assert "'/properties/a/uniqueItems'" in error.value.message
    assert error.value.param == "tools[0].x"


def test_other_tool_with_an_unsupported_schema_gets_any_object() -> None:
    (tool,) = dialect("").shape("p", Wishes((Tool("f", UNSUPPORTED),))).tools
    assert tool.parameters == ANY


def test_grammars_are_compiled_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(MARKED, MARKED.vocab_size)
    shape = Dialect("", MARKED, compiler).shape("p", Wishes(grammar=json_object_grammar("format")))
    monkeypatch.setattr(compiler, "_compile", None)
    assert shape.grammar
    compiler.matcher(shape.grammar)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": ADD.parameters}}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "2"},
]


def test_template_that_knows_tools_gets_messages_as_they_are() -> None:
    assert dialect(HERMES).messages(CHAT, TOOLS) == CHAT


def test_template_that_does_not_is_told_in_words() -> None:
    system, user, call, result = dialect("{{ messages }}").messages(CHAT, TOOLS)
    assert system["content"].startswith("Be brief.\n\n")
    assert json.dumps(TOOLS[0]) in system["content"]
    assert user == CHAT[1]
    assert call == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    }
    assert result == {"role": "user", "content": "<tool_response>\n2\n</tool_response>"}


def test_instructions_become_a_system_message_where_there_is_none() -> None:
    first, *rest = dialect("").messages(CHAT[1:2], TOOLS)
    assert first["role"] == "system" and rest == CHAT[1:2]


@pytest.mark.parametrize("strict", [True, False])
def test_tools_that_are_too_much_together_have_free_arguments_unless_strict(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile = GrammarCompiler.matcher

    def limited(compiler: GrammarCompiler, grammar: Grammar) -> Matcher:
        if grammar.source.count('"integer"') > 1:
            raise InvalidGrammar("it is too large", param="tools")
        return compile(compiler, grammar)

    monkeypatch.setattr(GrammarCompiler, "matcher", limited)
    tools = tuple(replace(ADD, name=name, strict=strict) for name in ("one", "two"))
    if strict:
        with pytest.raises(RequestError, match="too large"):
            dialect(HERMES).shape("p", Wishes(tools))
    else:
        shape = dialect(HERMES).shape("p", Wishes(tools))
        assert shape.call_grammar and [tool.parameters for tool in shape.tools] == [ANY, ANY]
