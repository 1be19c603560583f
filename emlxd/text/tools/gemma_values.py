"""A schema as Lark for values as Gemma writes them: strings between marks, names of members as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from emlxd.text.grammar import MAX_SOURCE, embedded_schema
from emlxd.text.json_schema import enforced, escaped_name
from emlxd.text.tools.raw_strings import KEYWORDS, Unenforceable, bounded, other_than
from emlxd.text.tools.raw_values import MOST_HOPS, any_rule, text_rules
from emlxd.text.tools.schema_types import EVERY, named_types, names_of, target, type_of

_NAME: Final = r"[^:,{}\[\]<>\"\s\x00-\x1f]([^:,{}\[\]<>\"\x00-\x1f]*[^:,{}\[\]<>\"\s\x00-\x1f])?"
_SCALARS: Final = frozenset({"boolean", "integer", "null", "number"})
_OF_NUMBERS: Final = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"})
_OF_ARRAYS: Final = frozenset({"items", "maxItems", "minItems"})
_OF_OBJECTS: Final = frozenset({"additionalProperties", "minProperties", "properties", "required"})
_CHOICES: Final = ("$ref", "allOf", "anyOf", "oneOf")
_ANY: Final = "anything"


def any_value_rules(quote: str, mark: str) -> list[str]:
    """The rule for any value. ``quote`` is Lark for ``mark``, which is around strings."""
    return [
        any_rule(mark),
        *text_rules("any_string", "ANY", quote, quote),
        f"any_scalar: {embedded_schema({'type': ['boolean', 'null', 'number']})}",
        f'ANY_NAME: /{_NAME}/ ":"',
        f"{_ANY}: any_string | any_scalar | any_array | any_object",
        f'any_array: "[" ({_ANY} ("," {_ANY})*)? "]"',
        f'any_object: "{{" (ANY_NAME {_ANY} ("," ANY_NAME {_ANY})*)? "}}"',
    ]


class ValueRules:
    """``rules`` for the values of one schema. Whatever a schema says is enforced, or it is refused."""

    def __init__(self, root: Any, prefix: str, quote: str, mark: str) -> None:
        """``prefix`` begins the names of rules; ``quote`` is Lark for ``mark``, which is around strings."""
        self.rules: list[str] = []
        self._root = root
        self._prefix = prefix
        self._quote = quote
        self._mark = mark
        self._referred: dict[str, str] = {}
        self._pending: list[str] = []
        self._names = 0
        self._size = 0

    def whole(self) -> str:
        """The rule for a value of the schema. Raises Unenforceable, whose text begins with the place."""
        name = self._at("#")
        while self._pending:
            reference = self._pending.pop()
            rule = self._referred[reference]
            self._add(rule, self._value(self._schema(reference), reference.removeprefix("#")))
        return name

    def _value(self, schema: Any, at: str) -> str:
        """Lark for a value of ``schema``, which lies ``at`` this JSON pointer."""
        if schema is False:
            raise Unenforceable(f"'{at}': no value is allowed, which cannot be enforced")
        asked = enforced(schema)
        if not asked:
            return _ANY
        for keyword in _CHOICES:
            if keyword in asked:
                if len(asked) > 1:
                    raise _unenforceable(at, keyword, "beside others")
                return self._chosen(keyword, asked[keyword], at)
        if "enum" in asked or "const" in asked:
            return self._listed(asked, at)
        return self._typed(asked, at)

    def _chosen(self, keyword: str, value: Any, at: str) -> str:
        if keyword == "$ref":
            return self._at(value)
        options = [option for option in value if option is not False]
        if keyword == "allOf" and len(value) > 1:
            raise _unenforceable(at, keyword, "with several schemas")
        if not options:
            raise Unenforceable(f"'{at}/{keyword}': there must be some value that is allowed")
        parts = [self._value(option, f"{at}/{keyword}/{index}") for index, option in enumerate(options)]
        return self._rule(" | ".join(dict.fromkeys(parts)))

    def _at(self, reference: str) -> str:
        """The rule for what ``reference`` points to. It is written later: references may go in circles."""
        reference = self._followed(reference)
        if reference not in self._referred:
            self._referred[reference] = self._new_name()
            self._pending.append(reference)
        return self._referred[reference]

    def _followed(self, reference: str) -> str:
        """``reference``, or where it leads to if there is nothing but another one."""
        for _ in range(MOST_HOPS):
            schema = self._schema(reference)
            if schema is False or enforced(schema).keys() != {"$ref"}:
                return reference
            reference = schema["$ref"]
        raise Unenforceable(f"'{reference}': references lead too far")

    def _schema(self, reference: str) -> Any:
        try:
            return target(reference, self._root)
        except LookupError:
            raise Unenforceable(f"'{reference}': the reference points to nothing") from None

    def _listed(self, asked: Mapping[str, Any], at: str) -> str:
        """One of the values of ``enum`` or ``const``."""
        if asked.keys() - {"type"} not in ({"enum"}, {"const"}):
            raise _unenforceable(at, "enum" if "enum" in asked else "const", "beside others")
        types = named_types(asked["type"]) if "type" in asked else EVERY
        values = asked["enum"] if "enum" in asked else [asked["const"]]
        allowed = [value for value in values if type_of(value) in types]
        if not allowed:
            raise Unenforceable(f"'{at}': there must be some value that is allowed")
        literals = [self._literal(value, at) for value in allowed if not isinstance(value, str)]
        texts = [self._text(value, at) for value in allowed if isinstance(value, str)]
        if texts:
            literals.append(self._quoted(" | ".join(dict.fromkeys(texts))))
        return self._rule(" | ".join(dict.fromkeys(literals)))

    def _typed(self, asked: Mapping[str, Any], at: str) -> str:
        known = {"type"} | KEYWORDS | _OF_NUMBERS | _OF_ARRAYS | _OF_OBJECTS
        for keyword in sorted(asked.keys() - known):
            raise _unenforceable(at, keyword)
        types = named_types(asked["type"]) if "type" in asked else EVERY
        options = []
        if scalars := types & _SCALARS:
            numbers = {key: asked[key] for key in _OF_NUMBERS & asked.keys()}
            options.append(self._rule(embedded_schema({"type": names_of(scalars), **numbers})))
        if "string" in types:
            options.append(self._string(asked, at))
        if "array" in types:
            options.append(self._array(asked, at))
        if "object" in types:
            options.append(self._object(asked, at))
        return options[0] if len(options) == 1 else self._rule(" | ".join(options))

    def _string(self, asked: Mapping[str, Any], at: str) -> str:
        bounds = {key: asked[key] for key in KEYWORDS & asked.keys()}
        if not bounds:
            return "any_string"
        try:
            return self._quoted(bounded(bounds))
        except Unenforceable as error:
            raise Unenforceable(f"'{at}': {error}") from None

    def _quoted(self, texts: str) -> str:
        """A string of ``texts``, Lark for a terminal: one of many is found faster there than by rules."""
        name = self._new_name()
        for rule in text_rules(name, f"({texts}) & ANY", self._quote, self._quote):
            self._append(rule)
        return name

    def _array(self, asked: Mapping[str, Any], at: str) -> str:
        items, least, most = asked.get("items", True), int(asked.get("minItems", 0)), asked.get("maxItems")
        if isinstance(items, list):
            raise _unenforceable(at, "items", "as a list")
        if items is False and least:
            raise _unenforceable(at, "minItems", "without items")
        if items is False or most == 0:
            return self._rule('"[" "]"')
        item = self._value(items, f"{at}/items")
        more = f'("," {item})'
        if most is not None:
            rest = f"{more}{{{max(least - 1, 0)},{int(most) - 1}}}"
        else:
            rest = f"{more}{{{least - 1},{least - 1}}} {more}*" if least > 1 else f"{more}*"
        return self._rule(f'"[" ({item} {rest}){"" if least else "?"} "]"')

    def _object(self, asked: Mapping[str, Any], at: str) -> str:
        properties, required = asked.get("properties", {}), asked.get("required", [])
        others = asked.get("additionalProperties", True)
        if asked.get("minProperties", 0) > len(set(required)):
            raise _unenforceable(at, "minProperties", "above the number of required properties")
        names = sorted({*properties, *required}, key=lambda name: (name.lower(), name))  # as templates do
        members: list[tuple[str, bool]] = []
        for name in names:
            schema = properties.get(name, others)
            if schema is False and name not in required:
                continue
            if not _is_plain(name):
                raise Unenforceable(f"'{at}/properties': the name {name!r} is not supported")
            value = self._value(schema, f"{at}/properties/{escaped_name(name)}")
            members.append((f"{json.dumps(f'{name}:')} {value}", name in required))
        free = None if others is False else self._free(names, others, at)
        return self._rule(f'"{{" {self._members(members, free)} "}}"')

    def _free(self, names: Sequence[str], schema: Any, at: str) -> str:
        """Lark for a member that has none of ``names``."""
        value = self._value(schema, f"{at}/additionalProperties")
        if not names:
            return f"ANY_NAME {value}"
        terminal = self._new_name().upper()
        self._add(terminal, f'{other_than(_NAME, names)} ":"')
        return f"{terminal} {value}"

    def _members(self, members: Sequence[tuple[str, bool]], free: str | None) -> str:
        """Lark for members in this order, of which those that are not required may be left out."""
        more = f'("," {free})*' if free else ""
        starts = [f"{free} {more}"] if free else []
        optional = True
        for member, required in reversed(members):
            if required:
                starts, optional = [], False
            starts.append(f"{member} {more}")
            more = self._rule(f'("," {member}){"" if required else "?"} {more}')
        return f"({' | '.join(starts)}){'?' if optional else ''}" if starts else ""

    def _literal(self, value: Any, at: str) -> str:
        match value:
            case str():
                return " ".join([self._quote, *([self._text(value, at)] if value else []), self._quote])
            case list():
                items = ' "," '.join(self._literal(item, at) for item in value)
                return f'"[" {items} "]"'
            case dict():
                if not all(map(_is_plain, value)):
                    raise Unenforceable(f"'{at}': a name in a value is not supported")
                members = (f"{json.dumps(f'{name}:')} {self._literal(value[name], at)}" for name in value)
                inner = ' "," '.join(members)
                return f'"{{" {inner} "}}"'
            case _:
                return json.dumps(json.dumps(value))

    def _text(self, value: str, at: str) -> str:
        if self._mark in value:
            raise Unenforceable(f"'{at}': a value cannot have '{self._mark}' in it")
        return json.dumps(value)

    def _rule(self, body: str) -> str:
        """The name of a rule for ``body``."""
        name = self._new_name()
        self._add(name, body)
        return name

    def _new_name(self) -> str:
        self._names += 1
        return f"{self._prefix}_{self._names}"

    def _add(self, name: str, body: str) -> None:
        self._append(f"{name}: {body}")

    def _append(self, rule: str) -> None:
        self.rules.append(rule)
        self._size += len(rule)
        if self._size > MAX_SOURCE:
            raise Unenforceable(f"'': more than {MAX_SOURCE} characters of a grammar are not supported")


def _is_plain(name: str) -> bool:
    """Whether a reader finds ``name`` as it was written."""
    return bool(re.fullmatch(_NAME, name)) and name.isprintable()


def _unenforceable(at: str, keyword: str, how: str = "") -> Unenforceable:
    return Unenforceable(f"'{at}/{keyword}': the keyword '{keyword}' is not supported {how}".rstrip())
