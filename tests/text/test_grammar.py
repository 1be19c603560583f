"""What may be said under a grammar: everything said is valid, and nothing hangs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from emlxd.core import Grammar
from emlxd.errors import RequestError, ServerFault
from emlxd.text import gguf_vocabulary
from emlxd.text import grammar as grammars
from emlxd.text.grammar import (
    GrammarCompiler,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from emlxd.text.tokenizer import Tokenizer
from tests.text.schemas import SCHEMAS, Schema
from tests.text.vocabularies import bpe, bpe_metadata, spm
from tests.text.walk import allowed, walk

_BPE, _SPM = bpe(), spm()
_BPE_COMPILER, _SPM_COMPILER = GrammarCompiler(_BPE, _BPE.vocab_size), GrammarCompiler(_SPM, _SPM.vocab_size)


def texts(grammar: Grammar, count: int, tokenizer: Tokenizer = _BPE) -> list[str]:
    """Up to ``count`` complete texts. Fails if there is none."""
    compiler = _BPE_COMPILER if tokenizer is _BPE else _SPM_COMPILER
    walks = [walk(compiler.matcher(grammar), tokenizer, seed) for seed in range(count)]
    found = [b"".join(map(tokenizer.token_bytes, ids)).decode() for ids in walks if ids is not None]
    assert found
    return found


def compile_schema(schema: Any) -> None:
    _BPE_COMPILER.matcher(json_schema_grammar(schema, "response_format"))


def refusal(schema: Any) -> str:
    with pytest.raises(RequestError) as error:
        compile_schema(schema)
    assert error.value.status == 400
    assert error.value.param == "response_format"
    return error.value.message


@pytest.mark.parametrize("tokenizer", [_BPE, _SPM], ids=["bpe", "spm"])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_every_finished_answer_is_valid(schema: Schema, tokenizer: Tokenizer) -> None:
    for text in texts(json_schema_grammar(schema, "response_format"), 8, tokenizer):
        jsonschema.validate(json.loads(text), schema)


def test_json_object() -> None:
    assert all(isinstance(json.loads(text), dict) for text in texts(json_object_grammar("format"), 20))


@pytest.mark.parametrize(
    "pattern", ["[a-c]{2,5}", "a|bc", "^x+y$", r"\d{3}-\w", "(?i)hello", "(a*)*b", "", "ř{2}"]
)
def test_regex(pattern: str) -> None:
    found = texts(regex_grammar(pattern, "regex"), 8)
    assert all(re.fullmatch(pattern, text) for text in found), found


def test_choice() -> None:
    choices = ["a", "ab", 'say "x"\n', "ž\\", ""]
    assert set(texts(choice_grammar(choices, "choice"), 40)) == set(choices)


def test_lark() -> None:
    source = 'start: item ("," item)*\nitem: WORD | "(" start ")"\nWORD: /[a-z]{1,3}/'
    for text in texts(lark_grammar(source, "grammar"), 20):
        assert re.fullmatch("[a-z(),]+", text) and text.count("(") == text.count(")")


def test_white_space_is_bounded() -> None:
    matcher = _BPE_COMPILER.matcher(json_object_grammar("format"))
    newline, brace = ord("\n"), ord("{")
    matcher.accept(brace)
    for _ in range(8):
        assert newline in allowed(matcher.mask())
        matcher.accept(newline)
    assert newline not in allowed(matcher.mask())


def test_white_space_is_bounded_in_a_schema_within_a_grammar() -> None:
    source = f"start: {grammars.embedded_schema({'type': 'array'})}"
    matcher = _BPE_COMPILER.matcher(lark_grammar(source, "tools"))
    assert not matcher.accepts([ord("["), *[ord("\n")] * 9])
    assert matcher.accepts([ord("["), *[ord("\n")] * 8, ord("]")])


def test_mask_is_as_wide_as_the_logits_and_allows_nothing_beyond_the_vocabulary() -> None:
    matcher = GrammarCompiler(_BPE, 500).matcher(Grammar("regex", "(?s:.*)", "regex"))
    mask = matcher.mask()
    assert len(mask) == 64
    assert max(allowed(mask)) < _BPE.vocab_size


def test_special_tokens_are_not_text() -> None:
    free = set(allowed(_BPE_COMPILER.matcher(Grammar("regex", "(?s:.+)", "regex")).mask()))
    assert not free & _BPE.special_ids


def test_name_of_a_special_token_is_spelled() -> None:
    ids = walk(_BPE_COMPILER.matcher(choice_grammar(["a<|im_end|>b"], "choice")), _BPE, 1)
    assert ids is not None and not _BPE.special_ids.intersection(ids)
    assert b"".join(map(_BPE.token_bytes, ids)) == b"a<|im_end|>b"


@pytest.mark.parametrize("compiler", [_BPE_COMPILER, _SPM_COMPILER], ids=["bpe", "spm"])
def test_text_is_followed_however_it_is_tokenized(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(choice_grammar(["hello world"], "choice"))
    assert not matcher.accepts_text("hello you")
    assert matcher.accepts_text("hello") and matcher.accepts_text(" world")
    assert matcher.finished


def test_end_tokens_are_allowed_when_the_text_may_end() -> None:
    matcher = _BPE_COMPILER.matcher(choice_grammar(["a", "ab"], "choice"))
    matcher.accept(ord("a"))
    assert set(allowed(matcher.mask())) == {ord("b"), *_BPE.eos_ids}
    matcher.accept(ord("b"))
    assert matcher.finished
    assert set(allowed(matcher.mask())) == _BPE.eos_ids


@pytest.fixture(scope="module")
def endless() -> Tokenizer:
    return Tokenizer(replace(gguf_vocabulary.load(bpe_metadata()), eos_ids=frozenset()))


@pytest.mark.parametrize(
    "grammar",
    [
        regex_grammar("ab?c", "regex"),
        choice_grammar(["one", "two"], "choice"),
        json_schema_grammar({"type": "number", "multipleOf": 0.3, "minimum": -0.2, "maximum": 0.5}, "s"),
        json_schema_grammar({"type": "integer", "minimum": 3, "maximum": 40}, "s"),
    ],
)
def test_a_model_without_an_end_token_ends_where_nothing_may_follow(
    grammar: Grammar, endless: Tokenizer
) -> None:
    compiler = GrammarCompiler(endless, endless.vocab_size + 3)
    for seed in range(8):
        assert walk(compiler.matcher(grammar), endless, seed) is not None


@pytest.mark.parametrize("pattern", ["", "()"])
def test_a_model_without_an_end_token_cannot_write_nothing(pattern: str, endless: Tokenizer) -> None:
    with pytest.raises(RequestError, match="Only an empty text satisfies 'regex'"):
        GrammarCompiler(endless, endless.vocab_size).matcher(regex_grammar(pattern, "regex"))


def test_copies_go_their_own_ways() -> None:
    one = _BPE_COMPILER.matcher(choice_grammar(["ax", "by"], "choice"))
    other = one.copy()
    one.accept(ord("a"))
    other.accept(ord("b"))
    assert (allowed(one.mask()), allowed(other.mask())) == ([ord("x")], [ord("y")])


def test_token_that_is_not_allowed_is_a_fault() -> None:
    matcher = _BPE_COMPILER.matcher(choice_grammar(["a"], "choice"))
    with pytest.raises(ServerFault):
        matcher.accept(ord("b"))
    with pytest.raises(ServerFault):
        matcher.mask()


def test_tokens_that_do_not_fit_leave_a_matcher_as_it_was() -> None:
    matcher = _BPE_COMPILER.matcher(choice_grammar(["abc"], "choice"))
    assert not matcher.accepts(list(b"abd"))
    assert matcher.accepts(list(b"abc"))


def test_compiled_grammars_are_kept_and_the_oldest_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_CACHED", 2)
    compiler = GrammarCompiler(_BPE, _BPE.vocab_size)
    compiled: list[Grammar] = []
    compile_ = compiler._compile
    monkeypatch.setattr(
        compiler, "_compile", lambda grammar: (compiled.append(grammar), compile_(grammar))[1]
    )
    a, b, c = (Grammar("regex", letter, "regex") for letter in "abc")
    for grammar in (a, b, a, c, a, b):
        compiler.matcher(grammar)
    assert compiled == [a, b, c, b]


@pytest.mark.parametrize(
    "keyword",
    [
        "$dynamicRef",
        "$recursiveRef",
        "contains",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
        "x-guidance",
    ],
)
def test_unsupported_keyword_is_named_with_its_place(keyword: str) -> None:
    schema = {"properties": {"a/b": {"items": {keyword: {"type": "string"}}}}}
    message = refusal(schema)
    assert f"at '/properties/a~1b/items/{keyword}'" in message
    assert f"the keyword '{keyword}' is not supported" in message


@pytest.mark.parametrize(
    ("schema", "place", "problem"),
    [
        ({"format": "iri"}, "/format", "the format 'iri' is not supported"),
        ({"anyOf": [{"type": "text"}]}, "/anyOf/0/type", "'type' must be one or more of"),
        ({"properties": {"a": {"$ref": "other.json"}}}, "/properties/a/$ref", "into the schema itself"),
        ({"enum": []}, "/enum", "non-empty array"),
        ({"minItems": -1}, "/minItems", "non-negative integer"),
        ({"minimum": 2**60}, "/minimum", "beyond 2^53"),
        ({"minimum": "1"}, "/minimum", "must be a number"),
        ({"const": 2**60}, "/const", "beyond 2^53"),
        ({"pattern": "a" * 5000}, "/pattern", "at most 2000 characters"),
        ({"type": "object", "minProperties": 2}, "/minProperties", "number of required properties"),
        ({"items": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "/items/oneOf", "cannot overlap"),
        ({"items": {"type": "string", "pattern": "^(?=a)"}}, "/items/pattern", "look-around"),
        ({"anyOf": [3]}, "/anyOf/0", "must be an object or a boolean"),
        ([], "/", "must be an object or a boolean"),
    ],
)
def test_refusals_name_place_and_problem(schema: Any, place: str, problem: str) -> None:
    message = refusal(schema)
    assert f"at '{place}'" in message
    assert problem in message


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": False},
        {"properties": {"uniqueItems": {"unevaluatedProperties": True}}, "required": ["uniqueItems"]},
    ],
)
def test_keyword_that_asks_for_nothing_is_allowed(schema: Schema) -> None:
    compile_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"allOf": [{"$ref": "#"}, {"type": "integer"}]},
        {"$ref": "#/$defs/missing"},
        False,
    ],
)
def test_schema_that_nothing_satisfies_is_refused(schema: Schema) -> None:
    refusal(schema)


def _nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


_HOSTILE: dict[str, Any] = {
    "deep": _nested(10_000),
    "deep in a constant": {"const": json.loads("[" * 500 + "]" * 500)},
    "nested": _nested(45),
    "long enum": {"enum": [f"value {index}" for index in range(15_000)]},
    "huge enum": {"enum": [f"value {index}" for index in range(200_000)]},
    "many properties": {
        "type": "object",
        "properties": {f"p{index}": {"type": "string"} for index in range(900)},
    },
    "too many properties": {"properties": {f"p{index}": True for index in range(5_000)}},
    "exponential references": {
        "$defs": {
            f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 10} for i in range(30)
        }
        | {"d30": {"type": "null"}},
        "$ref": "#/$defs/d0",
    },
    "product of alternatives": {
        "allOf": [
            {
                "anyOf": [
                    {"type": "object", "properties": {f"a{i}": {"const": j}}, "required": [f"a{i}"]}
                    for j in range(4)
                ]
            }
            for i in range(9)
        ]
    },
    "many items": {"type": "array", "minItems": 10**12},
    "long strings": {"type": "string", "minLength": 10**6},
    "nested quantifiers": {"type": "string", "pattern": "^((a+)+)+$"},
    "large counts": {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"},
    "many states": {"type": "string", "pattern": "^(a|b)*a(a|b){30}$"},
    "many empty matches": {"type": "string", "pattern": "x*" * 300},
    "recursion": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("schema", _HOSTILE.values(), ids=_HOSTILE)
def test_hostile_schema_is_refused_or_followed(schema: Any) -> None:
    try:
        grammar = json_schema_grammar(schema, "response_format")
        ids = walk(_BPE_COMPILER.matcher(grammar), _BPE, 1, limit=100)
    except RequestError as error:
        assert error.status == 400
        return
    if ids is not None:
        jsonschema.validate(json.loads(_BPE.decode(ids)), schema)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|b)*a(a|b){40}",
        "((a{1,1000}){1,1000}){1,1000}",
        "(.*a){40}.*",
        "(" * 1500 + ")" * 1500,
        r"(\p{L}{1,500}\s){1,500}",
        "a" * 100_000,
        "(",
        "(?=a)b",
        r"(a)\1",
    ],
)
def test_hostile_regex_is_refused_or_followed(pattern: str) -> None:
    try:
        walk(_BPE_COMPILER.matcher(regex_grammar(pattern, "regex")), _BPE, 1, limit=100)
    except RequestError as error:
        assert (error.status, error.param) == (400, "regex")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "source",
    [
        "start: " + "(" * 3000 + '"x"' + ")" * 3000,
        'start: a\na: a a | "x" |',
        "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(40)) + 'a40: "x"',
        "start: start",
        "start: @missing",
        "nonsense",
        "",
        "start: A\nA: /(?s:.*)/ & ~/(?s:.*)a(.){20}c(?s:.*)/ & ~/(?s:.*)b(.){20}c(?s:.*)/",
    ],
)
def test_hostile_grammar_is_refused_or_followed(source: str) -> None:
    try:
        walk(_BPE_COMPILER.matcher(lark_grammar(source, "grammar")), _BPE, 1, limit=100)
    except RequestError as error:
        assert (error.status, error.param) == (400, "grammar")
