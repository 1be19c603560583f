"""Arguments as elements of text: which schemas they are held to, and what is read from them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from emlxd.core import Tool
from emlxd.errors import RequestError
from emlxd.text.dialect import Dialect, Wishes
from emlxd.text.json_schema import UnsupportedSchema
from emlxd.text.tools.table import FORMATS
from tests.text.test_answer import COMPILER, MARKED, encode
from tests.text.test_tools import WRITERS, read
from tests.text.walk import walk

Parameters = dict[str, Any]

ELEMENTS = {
    "qwen-coder": ("<parameter", "</function>"),
    "glm": ("<arg_key", "</tool_call>"),
    "minimax": ("<parameter", "</invoke>"),
}
"""What begins an argument, and what ends all of them."""

each_format = pytest.mark.parametrize("name", ELEMENTS)


def of(schema: Any, **more: Any) -> Parameters:
    """One required parameter ``x``, and no others."""
    return {
        "type": "object",
        "properties": {"x": schema},
        "required": ["x"],
        "additionalProperties": False,
    } | more


def held(name: str, parameters: Parameters, *, strict: bool = True) -> tuple[Tool, Any]:
    """The tool ``f`` as its calls are enforced, and a matcher for one call."""
    wishes = Wishes((Tool("f", parameters, strict, "tools[0]"),), "required", parallel=False)
    shape = Dialect("tools", MARKED, COMPILER, name).shape("", wishes)
    assert shape.grammar
    return shape.tools[0], COMPILER.matcher(shape.grammar)


def call(name: str, **arguments: str) -> str:
    return WRITERS[name]([("f", arguments)])


def arguments(name: str, tool: Tool, text: str) -> Any:
    """What is read of a held call."""
    reader = FORMATS[name].reader([tool])
    reader.hold()
    _, _, [(_, found)] = read(reader, [text])
    assert found.encode()
    return json.loads(found, parse_constant=pytest.fail)


def allows(name: str, parameters: Parameters, *, strict: bool = True, **given: str) -> bool:
    _, matcher = held(name, parameters, strict=strict)
    return bool(matcher.accepts(encode(call(name, **given))) and matcher.finished)


TAGS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
UNENFORCED = {"properties": {"x": {"type": "string"}, "tags": TAGS}, "required": ["x"]}


@each_format
def test_names_and_types_remain_of_a_schema_that_cannot_be_enforced(name: str) -> None:
    tool, matcher = held(name, UNENFORCED, strict=False)
    text = call(name, x="7", tags='["a", "a"]', more="b")
    assert matcher.accepts(encode(text)) and matcher.finished
    assert arguments(name, tool, text) == {"x": "7", "tags": ["a", "a"], "more": "b"}
    assert not allows(name, UNENFORCED, strict=False, tags="[]")


@each_format
def test_no_other_names_where_the_schema_has_none(name: str) -> None:
    closed = {**UNENFORCED, "additionalProperties": False}
    assert allows(name, closed, strict=False, x="a", tags="[]")
    assert not allows(name, closed, strict=False, x="a", more="b")


@each_format
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": "object"},
        {"additionalProperties": {"type": "string"}},
        {"properties": {}, "additionalProperties": {}},
        {"properties": {"y": {"type": "integer"}}},
        {"allOf": [{"properties": {"x": {"type": "integer"}}, "required": ["x"]}]},
        {"anyOf": [{"properties": {"x": {}}}, {"properties": {"y": {}}}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}},
        {"patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
        {"properties": None, "required": 5},
        {"properties": {"a>b": {}, " c": {}, "": {}}, "required": ["a>b"]},
        {"properties": {"y": {"enum": 5, "anyOf": 3, "type": [[]], "$ref": []}}},
    ],
)
def test_names_that_are_not_listed(name: str, parameters: Parameters) -> None:
    assert allows(name, parameters, strict=False)
    assert allows(name, parameters, strict=False, x="a", zzz="b")


@each_format
def test_other_arguments_are_held_to_their_schema(name: str) -> None:
    parameters = {"properties": {"x": {"type": "string"}}, "additionalProperties": {"type": "integer"}}
    assert allows(name, parameters, x="a", y="5", z="6")
    assert not allows(name, parameters, x="a", y="b")
    tool, _ = held(name, parameters)
    assert arguments(name, tool, call(name, x="5", y="5")) == {"x": "5", "y": 5}


@each_format
def test_other_names_cannot_be_those_of_the_schema(name: str) -> None:
    parameters = {"properties": {"x": {"type": "integer"}, "never": False}}
    for given in ({"y": "1", "x": "a"}, {"y": "1", " x": "a"}, {"never": "1"}):
        assert not allows(name, parameters, **given)


@each_format
def test_first_of_two_arguments_of_one_name_counts(name: str) -> None:
    tool, _ = held(name, {})
    first, second = call(name, y="1"), call(name, y="2")
    start, end = ELEMENTS[name]
    twice = first.replace(end, second[first.index(start) :])
    assert arguments(name, tool, twice) == {"y": 1}


@each_format
@pytest.mark.parametrize(
    "parameters",
    [
        {"allOf": [{"properties": {"x": {"type": "integer"}}, "required": ["x"]}]},
        {"properties": {"x": {}, "y": {}}, "minProperties": 1},
        {"properties": {"x": {}}, "maxProperties": 1},
        {"patternProperties": {"^x": {"type": "integer"}}},
        {"properties": {"a>b": {}}},
        {"type": ["string", "object"], "enum": ["a", {}]},
    ],
)
def test_what_is_asked_of_all_arguments_is_refused_when_strict(name: str, parameters: Parameters) -> None:
    with pytest.raises(UnsupportedSchema) as error:
        held(name, parameters)
    assert error.value.param == "tools[0]"
    held(name, parameters, strict=False)


BOUNDED = [
    ({"type": "string", "maxLength": 3}, ["", "abc", "a<b", "é\n\n"], ["abcd"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab"], ["a", "abcd"]),
    ({"type": "string", "maxLength": 100_000}, ["a" * 500], []),
    ({"type": "string", "pattern": "[0-9]"}, ["7", "a\n7b"], ["", "ab"]),
    ({"type": "string", "pattern": "[0-9]$"}, ["a7"], ["7a"]),
    ({"type": "string", "pattern": "^(a|b)$"}, ["a", "b"], ["c", "ab", "(a"]),
    ({"type": "string", "pattern": "a|b"}, ["a", "cbc"], ["c"]),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, ["abc"], ["", "abcd", "7"]),
    ({"type": "string", "pattern": "^https?:\\/\\/.+$"}, ["http://a/b"], ["ftp://a", "https://"]),
    ({"type": "string", "pattern": "^[^/]+/(?:x|\\(?y)$"}, ["a/x", "a/(y"], ["/x", "a/z"]),
    ({"type": "string", "pattern": "^[$^|]+#\"\\$$"}, ['^$|#"$'], ['a#"$', '^#"']),
    ({"type": "string", "format": "date"}, ["2024-02-29", "2023-12-31"], ["hello", "2023-02-29"]),
    ({"type": "string", "format": "date-time"}, ["2024-02-29T23:59:59.5Z"], ["2024-02-29"]),
    ({"type": "string", "format": "time"}, ["10:00:00+02:00"], ["10:00", "24:00:00Z"]),
    ({"type": "string", "format": "uuid"}, ["3f2504e0-4f89-11d3-9a0c-0305e82c3301"], ["3f2504e0"]),
    ({"type": "string", "format": "ipv4"}, ["192.168.0.255"], ["1.2.3", "1.2.3.256"]),
    ({"type": ["string", "null"], "maxLength": 3}, ["abc", "null"], ["hello"]),
    ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}, ["abc", "null"], ["hello"]),
    ({"anyOf": [{"enum": ["auto", None]}, {"type": "integer"}]}, ["auto", "null", "-7"], ["b", "7.5"]),
    ({"type": "string", "enum": ["a", None]}, ["a"], ["null", "b"]),
    ({"enum": ["a", 1, None, {"b": 2}]}, ["a", "1", "null", '{"b": 2}'], ["2", "b"]),
    ({"const": "a/b"}, ["a/b"], ["a"]),
    ({"allOf": [{"type": "integer"}]}, ["7"], ["hello"]),
    ({"allOf": [{"type": "string", "maxLength": 2}]}, ["ab"], ["abc"]),
    ({"$ref": "#/$defs/short", "description": "x"}, ["ab"], ["abc"]),
    ({"type": ["string", "integer"]}, ["a", "7", "7.5"], []),
    ({}, ["a", '"a"', "[1]"], []),
    (True, ["a", '"a"', "[1]"], []),
]  # fmt: skip


@each_format
@pytest.mark.parametrize(("schema", "good", "bad"), BOUNDED)
def test_bounds_of_a_string_are_enforced(name: str, schema: Any, good: list[str], bad: list[str]) -> None:
    parameters = of(schema) | {"$defs": {"short": {"type": "string", "maxLength": 2}}}
    for text in good:
        assert allows(name, parameters, x=text), text
        tool, _ = held(name, parameters)
        jsonschema.validate(arguments(name, tool, call(name, x=text)), parameters)
    for text in bad:
        assert not allows(name, parameters, x=text), text


UNENFORCEABLE = [
    {"enum": ["1", 2]},
    {"enum": ["null", None]},
    {"type": "string", "format": "email"},
    {"type": "string", "pattern": "^a|b$"},
    {"type": "string", "pattern": "(^a|b)c"},
    {"type": "string", "pattern": "^(?i)a$"},
    {"type": "string", "pattern": "^{1}a$"},
    {"type": "string", "pattern": "^[[:alpha:]]$"},
    {"type": "string", "allOf": [{"maxLength": 3}, {"pattern": "a"}]},
    {"enum": ["a", "</parameter></arg_value>"]},
    {"maxLength": 3},
    {"minimum": 3},
    {"type": ["string", "integer"], "minimum": 3},
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
    {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "array"}]},
    {"anyOf": [{"type": "string"}, {"const": 5}]},
    {"anyOf": [{"type": "string"}, {"const": True}]},
]


@each_format
@pytest.mark.parametrize("schema", UNENFORCEABLE)
def test_what_cannot_be_enforced_whole_is_refused_or_free(name: str, schema: Any) -> None:
    with pytest.raises(UnsupportedSchema) as error:
        held(name, of(schema))
    assert error.value.param == "tools[0]"
    assert allows(name, of(schema), strict=False, x="hello")


@pytest.mark.parametrize("schema", UNENFORCEABLE[:-1])
def test_json_can_be_held_to_it(schema: Any) -> None:
    held("hermes", of(schema))


@each_format
def test_reference_to_another_parameter(name: str) -> None:
    items = {"type": "array", "items": {"$ref": "#/properties/a"}}
    parameters = {"properties": {"a": {"type": "integer"}, "x": items, "y": {"$ref": "#/properties/x/items"}}}
    assert allows(name, parameters, x="[1, 2]", y="3")
    assert not allows(name, parameters, x='["b"]')
    assert not allows(name, parameters, y="b")


@each_format
def test_reference_to_the_whole(name: str) -> None:
    inner = {"$ref": "#/properties/a~0~1b/$defs/c", "$defs": {"c": {"type": "integer"}}}
    properties = {"x": {"$ref": "#"}, "a~/b": inner}
    parameters = {"type": "object", "properties": properties, "additionalProperties": False}
    assert allows(name, parameters, x='{"x": {}}')
    assert not allows(name, parameters, x='{"y": 1}')


@each_format
def test_parameter_that_is_never_given(name: str) -> None:
    parameters = {"properties": {"x": False, "y": {"type": "integer"}}, "additionalProperties": False}
    assert allows(name, parameters, y="1")
    assert not allows(name, parameters, x="1", y="1")


@each_format
def test_references_that_multiply_are_refused(name: str) -> None:
    chain = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(40)}
    held(name, of({"$ref": "#/$defs/0"}, **{"$defs": {**chain, "40": {"type": "integer"}}}))
    long = {"type": "array", "items": {"enum": ["a" * 20_000]}}
    many = {"properties": {f"p{n}": {"$ref": "#/$defs/long"} for n in range(40)}, "$defs": {"long": long}}
    with pytest.raises(RequestError):
        held(name, many)
    held(name, many, strict=False)


@each_format
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({}, "NaN", "NaN"),
        ({}, "[-Infinity]", "[-Infinity]"),
        ({}, "1e999", "1e999"),
        ({}, "9" * 5000, "9" * 5000),
        ({}, "[" * 1200, "[" * 1200),
        ({"type": "string"}, "[" * 1200, "[" * 1200),
        ({"type": "number"}, "-1e999", -1.7976931348623157e308),
        ({"type": "integer"}, "9" * 5000, int(1.7976931348623157e308)),
        ({}, '"\\ud800"', "\ud800"),
        ({"type": "object"}, '{"\\udfff": 1}', {"\udfff": 1}),
        ({"type": ["string", "integer"]}, "7.5", "7.5"),
    ],
)
def test_arguments_are_json(name: str, schema: Any, text: str, value: Any) -> None:
    assert arguments(name, Tool("f", of(schema)), call(name, x=text)) == {"x": value}


@each_format
def test_end_of_an_element_in_json(name: str) -> None:
    schema = {"type": "array", "items": {"type": "string"}}
    text = '["</parameter>", "</arg_value>", "]"]'
    tool, matcher = held(name, of(schema))
    assert matcher.accepts(encode(call(name, x=text)))
    assert arguments(name, tool, call(name, x=text)) == {"x": json.loads(text)}


@each_format
def test_end_of_an_element_is_not_in_a_string(name: str) -> None:
    for schema in ({}, {"type": "string", "maxLength": 50}):
        mark = FORMATS[name].value_mark  # type: ignore[attr-defined]
        assert not allows(name, of(schema), x=mark)


@each_format
@pytest.mark.parametrize(
    "schema", [*(schema for schema, _, _ in BOUNDED), *({"type": kind} for kind in ("array", "number"))]
)
def test_what_the_grammar_allows_is_valid(name: str, schema: Any) -> None:
    parameters = {
        "properties": {"x": schema, "y": {"type": "integer"}},
        "$defs": {"short": {"maxLength": 2, "type": "string"}},
    }
    tool, matcher = held(name, parameters)
    texts = [walk(matcher.copy(), MARKED, seed, 150) for seed in range(25)]
    found = [b"".join(map(MARKED.token_bytes, ids)).decode() for ids in texts if ids is not None]
    assert found
    for text in found:
        jsonschema.validate(arguments(name, tool, text), parameters)
