"""Which JSON types a schema allows, and what it refers to."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote

from emlxd.text.json_schema import schemas

Types = frozenset[str]

EVERY: Final = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})

_DEEPEST: Final = 100


def type_of(value: Any) -> str:
    """The type of a JSON value; a number is an "integer" if it has no fraction."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "integer" if value == value // 1 else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def types_of(schema: Any, root: Any) -> Types:
    """The types of the values of ``schema``, a part of ``root``; a "number" may be an "integer" too.

    Never too few: ``EVERY`` where the schema does not say. It need not be a valid one.
    """
    return _Types(root).of(schema)


def named_types(value: Any) -> Types:
    """The types that the keyword ``type`` allows."""
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) and name in EVERY for name in names):
        return EVERY
    return frozenset([*names, "integer"] if "number" in names else names)


def names_of(types: Types) -> list[str]:
    """For the keyword ``type``, in which "number" stands for integers too."""
    return sorted(types - {"integer"} if "number" in types else types)


def target(reference: Any, root: Any) -> Any:
    """What a JSON pointer into ``root`` points to. Raises LookupError if that does not exist."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise LookupError(reference)
    node = root
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal():
            node = node[int(name)]
        elif isinstance(node, dict):
            node = node[name]
        else:
            raise LookupError(reference)
    return node


def standalone(schema: Any, root: Any) -> Any:
    """``schema``, a part of ``root``, with definitions of its own for what it refers to.

    Raises LookupError for a reference to nothing.
    """
    numbers: dict[str, int] = {}
    whole = _renumbered(schema, numbers)
    definitions: dict[str, Any] = {}
    while len(definitions) < len(numbers):
        reference = list(numbers)[len(definitions)]
        definitions[str(len(definitions))] = _renumbered(target(reference, root), numbers)
    return {**whole, "$defs": definitions} if definitions else whole


def _renumbered(schema: Any, numbers: dict[str, int]) -> Any:
    """A copy with the number of each reference instead of its pointer, and without definitions."""
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
    whole = copy.deepcopy(kept)
    for _, node in schemas(whole):
        if isinstance(node, dict) and "$ref" in node:
            node["$ref"] = f"#/$defs/{numbers.setdefault(node['$ref'], len(numbers))}"
    return whole


class _Types:
    """Follows each reference once: a schema may refer to itself, and to one place in many ways."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._referred: dict[Any, Types] = {}

    def of(self, schema: Any, depth: int = 0) -> Types:
        if schema is False:
            return frozenset()
        if not isinstance(schema, Mapping) or depth > _DEEPEST:
            return EVERY
        allowed = [self._allowed(keyword, value, depth + 1) for keyword, value in schema.items()]
        return EVERY.intersection(*allowed)

    def _allowed(self, keyword: str, value: Any, depth: int) -> Types:
        match keyword, value:
            case "type", _:
                return named_types(value)
            case "const", _:
                return frozenset([type_of(value)])
            case "enum", [*values]:
                return frozenset(map(type_of, values))
            case "anyOf" | "oneOf", [*options]:
                return frozenset().union(*(self.of(option, depth) for option in options))
            case "allOf", [*parts]:
                return EVERY.intersection(*(self.of(part, depth) for part in parts))
            case "$ref", str():
                return self._at(value, depth)
            case _:
                return EVERY

    def _at(self, reference: str, depth: int) -> Types:
        if reference not in self._referred:
            self._referred[reference] = EVERY
            with suppress(LookupError):
                self._referred[reference] = self.of(target(reference, self._root), depth)
        return self._referred[reference]
