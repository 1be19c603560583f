"""Formats that write each argument as its own element of text, a string as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from emlxd.text.grammar import embedded_schema
from emlxd.text.tools.format import Malformed, TriggeredReader


class ParameterReader(TriggeredReader):
    """Collects arguments by their types. They are passed on as JSON, one at a time."""

    def begin_arguments(self, name: str) -> None:
        self.begin_call(name)
        self._tool = self.tools[name]
        self._names: set[str] = set()

    def argument(self, name: str, text: str) -> None:
        if name in self._names:
            raise Malformed
        value = _typed(text, parameter_schema(self._tool.parameters, name))
        lead = ", " if self._names else "{"
        self._names.add(name)
        self.arguments(
            f"{lead}{json.dumps(name, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        )

    def end_arguments(self) -> None:
        self.arguments("}" if self._names else "{}")


def parameter_schema(parameters: Any, name: str) -> Any:
    """The schema of one parameter, with the definitions that it may refer to."""
    if not isinstance(parameters, dict):
        return {}
    schema = parameters.get("properties", {}).get(name, {})
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    return shared | schema if isinstance(schema, dict) else schema


def _typed(text: str, schema: Any) -> Any:
    """``text`` as the JSON value that it stands for, or as a string where the schema has strings."""
    types = _types(schema)
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if not types or (_type(value) in types and not isinstance(value, str)) else text


def _types(schema: Any) -> set[str]:
    """The types that ``schema`` allows; empty if it does not say."""
    if not isinstance(schema, dict):
        return set()
    if "$ref" in schema:
        return _types(_target(schema))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return {_type(value) for value in values}
    if "type" in schema:
        named = schema["type"]
        return {
            "number" if name == "integer" else name
            for name in (named if isinstance(named, list) else [named])
        }
    if options := schema.get("anyOf") or schema.get("oneOf"):
        of_options = [_types(option) for option in options]
        return set().union(*of_options) if all(of_options) else set()
    return set()


def _target(schema: Mapping[str, Any]) -> Any:
    """What ``schema`` refers to, without its definitions: a chain of references ends there."""
    _, keyword, name = [*schema["$ref"].split("/", 2), "", ""][:3]
    return schema.get(keyword, {}).get(name) if keyword in ("$defs", "definitions") else None


def _type(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def value_rules(rule: str, schema: Any, end: str) -> list[str]:
    """Lark for the rule ``rule``: a value of ``schema`` as text, up to and with ``end``, Lark itself.

    A string may be anything without ``end`` in it, unless its schema lists or bounds it.
    """
    types, text = _types(schema), rule.upper()
    if schema and "string" not in types:
        return [f"{rule}: {rule}_json {end}", f"{rule}_json: {embedded_schema(schema)}"]
    if pattern := _string_pattern(schema):
        return [f"{rule}: {text} {end}", f"{text}: {pattern}"]
    if end.startswith('"'):
        return [f"{rule}[lazy]: {text}", f"{text}: /(?s:.*)/ {end}"]
    return [f"{rule}: {text} {end}", f"{text}: /(?s:.*)/"]


def argument_names(parameters: Mapping[str, Any]) -> list[str]:
    """The names that a grammar offers, in its order."""
    return list(dict.fromkeys([*parameters.get("properties", {}), *parameters.get("required", ())]))


def _string_pattern(schema: Mapping[str, Any]) -> str | None:
    """Lark for the strings of a schema that does not allow any."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return " | ".join(
            json.dumps(value if isinstance(value, str) else json.dumps(value)) for value in values
        )
    pattern = schema.get("pattern", "")
    if schema.get("type") == "string" and re.fullmatch(r"\^[^|]*[^|\\]\$", pattern):
        return f"/{pattern[1:-1].replace('/', chr(92) + '/')}/"
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if schema.get("type") == "string" and (least or most is not None):
        return f"/[^<]{{{least},{'' if most is None else most}}}/"
    return None
