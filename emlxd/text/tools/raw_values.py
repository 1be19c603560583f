"""The value of an argument as an element of text: a string as it is, anything else as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from emlxd.text.grammar import embedded_schema
from emlxd.text.json_schema import enforced
from emlxd.text.tools.json_text import parsed, written
from emlxd.text.tools.raw_strings import KEYWORDS, Unenforceable, bounded, without
from emlxd.text.tools.schema_types import (
    EVERY,
    Types,
    named_types,
    standalone,
    target,
    type_of,
    types_of,
)

# Numbers that a double can hold, so that none of them is taken for a string.
_SCALARS: Final = MappingProxyType(
    {
        "null": '"null"',
        "boolean": '"true" | "false"',
        "integer": "/-?(0|[1-9][0-9]{0,17})/",
        "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/",
    }
)
_ANY: Final = "ANY"
MOST_HOPS: Final = 50


def json_of(text: str, types: Types) -> str:
    """The JSON of the value that ``text`` stands for: a string, where it is no JSON of one of ``types``."""
    if types != {"string"}:
        try:
            value = parsed(text, nearest="string" not in types)
            if types == EVERY or (type_of(value) in types and not isinstance(value, str)):
                return written(value)
        except ValueError:
            pass
    return written(text)


def any_rule(mark: str) -> str:
    """Lark for the terminal of any text that ``mark`` may follow."""
    return f"{_ANY}: {without(mark)}"


def value_rules(rule: str, schema: Any, root: Any, end: str, mark: str) -> list[str]:
    """Lark for the rule ``rule``: a value of ``schema``, a part of ``root``, up to and with ``end``.

    ``end`` is Lark itself. No string has the text ``mark`` in it, as ``any_rule`` says, which is needed too.
    Raises Unenforceable.
    """
    try:
        if "string" not in types_of(schema, root):
            return [
                f"{rule}: {rule}_json {end}",
                f"{rule}_json: {embedded_schema(standalone(schema, root))}",
            ]
        texts = _texts(schema, root, mark)
    except LookupError as error:
        raise Unenforceable(f"the reference {error} points to nothing") from None
    return text_rules(rule, texts, end)


def text_rules(rule: str, texts: str, end: str, start: str = "") -> list[str]:
    """Lark for the rule ``rule``: one of ``texts``, Lark for a terminal, between ``start`` and ``end``."""
    text = rule.upper()
    if end.startswith('"'):  # in one with the text, which could go on with the beginning of it
        return [f"{rule}: {text}", f"{text}: {start} ({texts}) {end}"]
    return [f"{rule}: {start} {text} {end}", f"{text}: {texts}"]


@dataclass
class _Allowed:
    """What a schema allows that allows strings, piece by piece."""

    bare: set[str] = field(default_factory=set)
    """The types of which any value will do."""

    values: list[Any] = field(default_factory=list)
    strings: list[str] = field(default_factory=list)
    """Lark for strings that are bounded in some way."""

    def add(self, asked: Mapping[str, Any]) -> None:
        types = named_types(asked["type"]) if "type" in asked else EVERY
        others = asked.keys() - {"type"}
        if others in ({"enum"}, {"const"}):
            values = asked["enum"] if "enum" in asked else [asked["const"]]
            self.values += [value for value in values if type_of(value) in types]
        elif others <= KEYWORDS:
            bounds = bool(others) and "string" in types
            self.bare |= types - {"string"} if bounds else types
            if bounds:
                self.strings.append(bounded(asked))
        else:
            raise Unenforceable(f"beside strings, {_quoted(others)} cannot be enforced")


def _texts(schema: Any, root: Any, mark: str) -> str:
    """Lark for the texts that stand for a value of ``schema``."""
    allowed = _Allowed()
    for option in _options(schema, root):
        allowed.add(option)
    _check_read_back(allowed, types_of(schema, root))
    if "string" in allowed.bare:
        return _ANY
    if allowed.bare & {"array", "object"}:
        raise Unenforceable("strings cannot be bounded where there may also be arrays or objects")
    literals = [json.dumps(_as_text(value)) for value in allowed.values]
    if any(mark in literal for literal in literals):
        raise Unenforceable(f"a value cannot have '{mark}' in it")
    scalars = [_SCALARS[name] for name in sorted(allowed.bare)]
    texts = [*(f"({text})" for text in allowed.strings), *literals, *scalars]
    if not texts:
        raise Unenforceable("there must be some value that is allowed")
    return f"({' | '.join(texts)}) & {_ANY}"


def _check_read_back(allowed: _Allowed, types: Types) -> None:
    """Raises Unenforceable if a text could be read as a value that is not allowed."""
    if allowed.bare or allowed.strings:
        single = [value for value in allowed.values if not isinstance(value, str) and value is not None]
        known = {"string", *allowed.bare, *map(type_of, allowed.values)}
        if not types <= known or any(type_of(value) not in allowed.bare for value in single):
            raise Unenforceable("beside other strings, only strings and null can be enumerated")
    elif any(json_of(_as_text(value), types) != written(value) for value in allowed.values):
        raise Unenforceable("a string among the values reads like another type")


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _options(schema: Any, root: Any) -> list[Mapping[str, Any]]:
    """What ``schema`` asks, in one way or in several."""
    asked = _asked(schema, root)
    choices = asked.get("anyOf") or asked.get("oneOf")
    if choices and len(asked) == 1:
        return [_asked(choice, root) for choice in choices if choice is not False]
    return [asked]


def _asked(schema: Any, root: Any) -> Mapping[str, Any]:
    """The keywords of ``schema`` that ask for something, or of what it merely stands for."""
    for _ in range(MOST_HOPS):
        asked = enforced(schema)
        match asked:
            case {"$ref": reference} if len(asked) == 1:
                schema = target(reference, root)
            case {"allOf": [only]} | {"anyOf": [only]} | {"oneOf": [only]} if len(asked) == 1:
                schema = only
            case _:
                return asked
    raise Unenforceable("references lead too far")


def _quoted(keywords: set[str]) -> str:
    return ", ".join(f"'{keyword}'" for keyword in sorted(keywords))
