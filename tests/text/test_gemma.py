"""What of a tool's schema is enforced in Gemma's calls, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from emlxd.core import Grammar, Tool
from emlxd.text.grammar import GrammarCompiler
from emlxd.text.json_schema import UnsupportedSchema
from emlxd.text.tools.gemma import GEMMA
from tests.text.schemas import SCHEMAS, Schema, obj
from tests.text.test_tools import read, special_mark, tokenizer
from tests.text.walk import walk

REFUSED = {
    "all of": "/properties/x/allOf",
    "all of objects": "/properties/x/allOf",
    "awkward keys": "/properties/x/properties",
    "draft 7 tuple": "/properties/x/additionalItems",
    "email": "/properties/x",
    "free but not that": "/properties/x/maxProperties",
    "half anchored": "/properties/x",
    "map": "/properties/x/maxProperties",
    "non-empty map": "/properties/x/maxProperties",
    "open tuple": "/properties/x/prefixItems",
    "pattern properties": "/properties/x/",
    "required only": "/properties/x/maxProperties",
    "siblings of a reference": "/properties/x/$ref",
    "tuple": "/properties/x/prefixItems",
}


def tool_of(schema: Schema) -> Tool:
    """A tool with one argument of ``schema``."""
    inner = dict(schema) if isinstance(schema, dict) else schema
    shared = {}
    if isinstance(inner, dict):
        shared = {key: inner.pop(key) for key in ("$defs", "definitions") if key in inner}
    return Tool("f", obj("x", x=inner) | shared)


def rules_of(tool: Tool, *, special: bool) -> str:
    mark = special_mark(tokenizer(GEMMA.markers)) if special else json.dumps
    return f"start: calls\n{GEMMA.rules([tool], mark, parallel=False)}"


def texts(tool: Tool, *, special: bool, count: int = 8) -> list[str]:
    tokens = tokenizer(GEMMA.markers if special else ())
    compiled = GrammarCompiler(tokens, tokens.vocab_size)
    grammar = Grammar("lark", rules_of(tool, special=special), "tools")
    walks = (walk(compiled.matcher(grammar), tokens, seed) for seed in range(count))
    return [b"".join(map(tokens.token_bytes, ids)).decode() for ids in walks if ids is not None]


def arguments_in(tool: Tool, text: str) -> Any:
    content, _, [(_, arguments)] = read(GEMMA.reader([tool]), [text])
    assert content == ""
    return json.loads(arguments)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", sorted(SCHEMAS.keys() - REFUSED.keys() - {"linked list"}))
def test_what_is_allowed_is_valid(name: str, special: bool) -> None:
    tool = tool_of(SCHEMAS[name])
    found = texts(tool, special=special)
    assert found
    for text in found:
        jsonschema.validate(arguments_in(tool, text), tool.parameters)


def test_a_schema_may_refer_to_itself() -> None:
    schema = SCHEMAS["linked list"]
    assert isinstance(schema, dict)
    found = texts(Tool("f", schema), special=True, count=40)
    assert any("tail:{" in text for text in found)
    for text in found:
        jsonschema.validate(arguments_in(Tool("f", schema), text), schema)


def test_references_may_lead_far() -> None:
    chain = {f"n{index}": obj("n", n={"$ref": f"#/$defs/n{index + 1}"}) for index in range(1500)}
    schema = obj("x", x={"$ref": "#/$defs/n0"}) | {"$defs": chain | {"n1500": {"const": 7}}}
    assert rules_of(Tool("f", schema), special=True).count("\n") > 1500


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (obj("x", x={"$ref": "#/$defs/x"}) | {"$defs": {"x": {"$ref": "#/$defs/x"}}}, "#/$defs/x"),
        (obj("x", x={"$ref": "#/$defs/y"}), "#/$defs/y"),
        (obj("x", x=False), "/properties/x"),
        (obj("x", x={"type": "array", "items": False, "minItems": 1}), "/properties/x/minItems"),
        (obj("x", x={"enum": ['a<|"|>b']}), "/properties/x"),
        (obj("x", x={"type": "string", "enum": [1]}), "/properties/x"),
        (obj("x", x={"anyOf": [False]}), "/properties/x/anyOf"),
        (obj("a/b", **{"a/b": {"prefixItems": [True]}}), "/properties/a~1b/prefixItems"),
    ],
)
def test_mistakes_are_named_by_their_place(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(UnsupportedSchema) as caught:
        rules_of(Tool("f", schema), special=True)
    assert f"at '{place}'" in caught.value.message


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_its_place(name: str) -> None:
    with pytest.raises(UnsupportedSchema, match=f"at '{REFUSED[name]}".replace("$", r"\$")):
        rules_of(tool_of(SCHEMAS[name]), special=True)
