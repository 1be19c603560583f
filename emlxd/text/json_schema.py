"""What of JSON Schema is enforced, and how large a schema may be.

A schema that asks for more is refused by keyword and place: it is never enforced in part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from emlxd.errors import RequestError

MAX_DEPTH = 100
MAX_SCHEMAS = 10_000
MAX_ENUM = 20_000
MAX_PROPERTIES = 1_000
MAX_PATTERN = 2_000
MAX_LITERAL = 10_000

FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)
ENFORCED = frozenset(
    {
        *("type", "const", "enum", "$ref", "allOf", "anyOf", "oneOf"),
        *("properties", "patternProperties", "additionalProperties", "required"),
        *("minProperties", "maxProperties"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
)
REFUSED = frozenset(
    {
        *("not", "if", "then", "else", "$dynamicRef", "$recursiveRef"),
        *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"),
        *("dependencies", "dependentRequired", "dependentSchemas", "propertyNames", "unevaluatedProperties"),
        "x-guidance",
    }
)

# Refused keywords with a value that asks for nothing.
_IDLE: Mapping[str, Any] = {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True}

_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_ONE = frozenset({"additionalItems", "additionalProperties", "items"})
_LIST = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_MAP = frozenset({"$defs", "definitions", "patternProperties", "properties"})
_COUNTS = frozenset({"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"})
_BOUNDS = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"})
_EXACT = 2**53


class UnsupportedSchema(RequestError):
    """A schema that cannot be enforced as it is written."""

    code = "unsupported_schema"


def checked(schema: Any, param: str) -> Any:
    """``schema`` without keywords that ask for nothing.

    Raises UnsupportedSchema, naming keyword and place, unless all of it can be enforced. What only the
    grammar compiler can tell, such as a ``oneOf`` whose branches overlap, passes.
    """
    _check_depth(schema, param)
    enumerated = 0
    for count, (place, node) in enumerate(schemas(schema)):
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise _refusal("a schema must be an object or a boolean", place, param)
        for keyword, value in node.items():
            if problem := _problem(keyword, value):
                raise _refusal(problem, f"{place}/{escaped_name(keyword)}", param)
        if problem := _too_few_names(node):
            raise _refusal(problem, f"{place}/minProperties", param)
        enumerated += len(node.get("enum", ()))
        if count >= MAX_SCHEMAS or enumerated > MAX_ENUM:
            raise UnsupportedSchema(
                f"Invalid schema in '{param}': too large; expected at most {MAX_SCHEMAS} subschemas "
                f"and {MAX_ENUM} enum values in all.",
                param=param,
            )
    return _without_idle(schema)


def schemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """``schema`` and all schemas in it, each with its JSON pointer ("" is the root)."""
    stack = [("", schema)]
    while stack:
        place, node = stack.pop()
        yield place, node
        if isinstance(node, dict):
            stack.extend(reversed(list(_children(place, node))))


def places(schema: Any, keyword: str) -> list[str]:
    """The JSON pointers at which ``keyword`` is used."""
    return [
        f"{place}/{keyword}" for place, node in schemas(schema) if isinstance(node, dict) and keyword in node
    ]


def _children(place: str, node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword, value in node.items():
        here = f"{place}/{escaped_name(keyword)}"
        if keyword in _LIST and isinstance(value, list):
            yield from ((f"{here}/{index}", item) for index, item in enumerate(value))
        elif keyword in _MAP and isinstance(value, dict):
            yield from ((f"{here}/{escaped_name(name)}", item) for name, item in value.items())
        elif keyword in _ONE:
            yield here, value


def _without_idle(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_idle(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {name: _inner(name, value) for name, value in node.items() if not _idle(name, value)}


def _inner(keyword: str, value: Any) -> Any:
    if keyword in _MAP and isinstance(value, dict):
        return {name: _without_idle(item) for name, item in value.items()}
    return _without_idle(value) if keyword in _ONE | _LIST else value


def _idle(keyword: str, value: Any) -> bool:
    return isinstance(value, bool) and _IDLE.get(keyword) is value


def _problem(keyword: str, value: Any) -> str | None:
    """Why ``keyword`` cannot be enforced with ``value``. Unknown keywords are annotations."""
    if keyword in REFUSED:
        return None if _idle(keyword, value) else f"the keyword '{keyword}' is not supported"
    if keyword in _LIST - _ONE and not (isinstance(value, list) and value):
        return f"'{keyword}' must be a non-empty array"
    if keyword in _MAP and not isinstance(value, dict):
        return f"'{keyword}' must be an object"
    if keyword in _COUNTS and (type(value) not in (int, float) or value < 0 or value != int(value)):
        return f"'{keyword}' must be a non-negative integer"
    if keyword in _BOUNDS:
        return _bound_problem(keyword, value)
    if check := _VALUES.get(keyword):
        return check(value)
    return None


def _bound_problem(keyword: str, value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"'{keyword}' must be a number"
    if abs(value) > _EXACT:
        return f"'{keyword}' beyond 2^53 is not supported"
    return f"'{keyword}' must be positive" if keyword == "multipleOf" and value <= 0 else None


def _type_problem(value: Any) -> str | None:
    names = value if isinstance(value, list) else [value]
    if names and all(isinstance(name, str) and name in _TYPES for name in names):
        return None
    return f"'type' must be one or more of {', '.join(sorted(_TYPES))}"


def _format_problem(value: Any) -> str | None:
    if isinstance(value, str) and value in FORMATS:
        return None
    return f"the format {_short(value)} is not supported; supported are {', '.join(sorted(FORMATS))}"


def _enum_problem(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return "'enum' must be a non-empty array"
    return next(filter(None, map(_const_problem, value)), None)


def _const_problem(value: Any) -> str | None:
    if isinstance(value, int | float) and abs(value) > _EXACT:
        return f"the number {_short(value)} is beyond 2^53"
    if len(json.dumps(value)) > MAX_LITERAL:
        return f"a value may have at most {MAX_LITERAL} characters"
    return None


def _pattern_problem(value: Any) -> str | None:
    if not isinstance(value, str):
        return "'pattern' must be a string"
    return f"a pattern may have at most {MAX_PATTERN} characters" if len(value) > MAX_PATTERN else None


def _properties_problem(value: Any) -> str | None:
    return f"more than {MAX_PROPERTIES} properties" if len(value) > MAX_PROPERTIES else None


def _required_problem(value: Any) -> str | None:
    names = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return None if names else "'required' must be an array of strings"


def _ref_problem(value: Any) -> str | None:
    local = isinstance(value, str) and value.startswith("#")
    return None if local else f"the reference {_short(value)} does not point into the schema itself"


_VALUES = {
    "$ref": _ref_problem,
    "const": _const_problem,
    "enum": _enum_problem,
    "format": _format_problem,
    "pattern": _pattern_problem,
    "properties": _properties_problem,
    "required": _required_problem,
    "type": _type_problem,
}


def _too_few_names(node: Mapping[str, Any]) -> str | None:
    """A grammar cannot tell free names apart, so it could count one name twice."""
    least = node.get("minProperties", 0)
    if least > max(1, len(set(node.get("required", ())))):
        return "'minProperties' above 1 is supported only up to the number of required properties"
    return None


def _check_depth(schema: Any, param: str) -> None:
    level = [schema]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _parts(node)]
        if not level:
            return
    raise UnsupportedSchema(
        f"Invalid schema in '{param}': nested more than {MAX_DEPTH} levels deep.", param=param
    )


def _parts(node: Any) -> list[Any]:
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [part for part in parts if isinstance(part, dict | list)]


def _refusal(problem: str, place: str, param: str) -> UnsupportedSchema:
    return UnsupportedSchema(f"Invalid schema in '{param}' at '{place or '/'}': {problem}.", param=param)


def enforced(schema: Any) -> dict[str, Any]:
    """The keywords of ``schema`` that ask for something."""
    return {} if schema is True else {key: schema[key] for key in schema if key in ENFORCED}


def escaped_name(name: str) -> str:
    """``name`` as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
