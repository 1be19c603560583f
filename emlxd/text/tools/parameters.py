"""Formats that write each argument as its own element of text, a string as it is."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from emlxd.core import Tool
from emlxd.text.grammar import MAX_SOURCE
from emlxd.text.json_schema import UnsupportedSchema, escaped_name
from emlxd.text.reader import Steps
from emlxd.text.tools.format import Format, Malformed, TriggeredReader, one_of_calls
from emlxd.text.tools.json_calls import JsonCallReader, series
from emlxd.text.tools.json_text import written
from emlxd.text.tools.raw_strings import Unenforceable, other_than
from emlxd.text.tools.raw_values import any_rule, json_of, value_rules
from emlxd.text.tools.schema_types import EVERY, Types, named_types, names_of, types_of

# What marks and the readers' ends of names leave of a name as it is.
_NAME: Final = r"[^<>\s\x00-\x1f]([^<>\x00-\x1f]*[^<>\s\x00-\x1f])?"

# They ask something of the arguments together.
_OF_ALL: Final = frozenset(
    {
        *("$ref", "allOf", "anyOf", "const", "enum", "oneOf"),
        *("maxProperties", "minProperties", "patternProperties"),
    }
)


class ParameterReader(JsonCallReader, TriggeredReader):
    """Collects arguments by their types. They are passed on as JSON, one at a time."""

    def _begin_arguments(self, name: str) -> None:
        self.begin_call(name)
        self._tool = self.tools[name]
        self._names: set[str] = set()

    def value_text(self, name: str, mark: str) -> Steps[str]:
        """The text of an argument up to ``mark``, which may be in it where it can only be JSON."""
        parts: list[str] = []
        if self.held and "string" not in self._types(name):
            parts.append((yield from self.skip_space()))
            if (yield from self.peek()) in ("{", "["):
                yield from self.value(parts.append)
        parts.append((yield from self.before(mark)))
        return "".join(parts)

    def argument(self, name: str, text: str) -> None:
        if name in self._names:
            if self.held:  # a grammar cannot tell free names apart: the first one counts
                return
            raise Malformed
        value = json_of(text, self._types(name))
        lead = ", " if self._names else "{"
        self._names.add(name)
        self.arguments(f"{lead}{written(name)}: {value}")

    def read_arguments(self, name: str, begin: str, end: str, one: Callable[[], Steps[None]]) -> Steps[None]:
        """All of the call of ``name``, each by ``one`` after ``begin``, up to ``end``."""
        self._begin_arguments(name)
        while True:
            yield from self.skip_space()
            if (yield from self.skip(end)):
                break
            yield from self.expect(begin)
            yield from one()
        self.arguments("}" if self._names else "{}")

    def _types(self, name: str) -> Types:
        parameters = self._tool.parameters
        return types_of(parameter_schema(parameters, name), parameters)


class ParameterFormat(Format):
    """Such a format, by how it writes one argument and a call."""

    raw = True
    value_mark: str
    """What ends a value, and so cannot be in it."""

    @abstractmethod
    def key(self, name: str) -> str:
        """Lark for a terminal with the name of an argument, which is Lark itself."""

    def argument(self, key: str, value: str, mark: Callable[[str], str]) -> str:
        """Lark for an argument of the terminal ``key`` and the rule ``value``."""
        return f"{key} {value}"

    @abstractmethod
    def end(self, mark: Callable[[str], str]) -> str:
        """Lark for what ends a value."""

    def series(self, mark: Callable[[str], str], *, parallel: bool) -> list[str]:
        """Lark for the rule ``calls``, made of the rule ``call``."""
        return [series("call", '"\\n"', parallel=parallel)]

    def call(self, calls: str, mark: Callable[[str], str]) -> str:
        """Lark for a call, of which ``calls`` is the inner part."""
        return calls

    @abstractmethod
    def inner_call(self, name: str, arguments: str) -> str:
        """Lark for the part of a call that is the tool's own."""

    def rules(self, tools: Sequence[Tool], mark: Callable[[str], str], *, parallel: bool) -> str:
        """Raises UnsupportedSchema for a tool whose arguments cannot be enforced in this way to write."""
        rules = [
            *self.series(mark, parallel=parallel),
            f"call: {self.call(one_of_calls(tools), mark)}",
            any_rule(self.value_mark),
        ]
        for index, tool in enumerate(tools):
            rules += self._tool_rules(index, tool, mark)
        return "\n".join(rules)

    def freed(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Names and types remain: names are offered, and values are read as what they are."""
        properties = {name: schema for name, schema in _named(parameters).items() if _is_plain(name)}
        others = _type_alone(parameters.get("additionalProperties", {}), parameters)
        return {
            "type": "object",
            "properties": {name: _type_alone(schema, parameters) for name, schema in properties.items()},
            "required": [
                name
                for name in _required(parameters)
                if _is_plain(name) and properties.get(name) is not False
            ],
            "additionalProperties": True if "patternProperties" in parameters else others,
        }

    def _tool_rules(self, index: int, tool: Tool, mark: Callable[[str], str]) -> list[str]:
        _check_whole(tool)
        required = _required(tool.parameters)
        arguments, rules, size = [], [], 0
        for number, (name, schema) in enumerate(_offered(tool.parameters)):
            key, value = f"KEY_{index}_{number}", f"value_{index}_{number}"
            rules.append(f"{key}: {self.key(_name_rule(name, tool.parameters))}")
            times = "*" if name is None else "" if name in required else "?"
            arguments.append(f"({self.argument(key, value, mark)}){times}")
            try:
                rules += value_rules(value, schema, tool.parameters, self.end(mark), self.value_mark)
            except Unenforceable as error:
                raise _refusal(tool, _place(name), str(error)) from None
            size += sum(map(len, rules[-2:]))
            if size > MAX_SOURCE:
                raise _refusal(tool, _place(name), f"more than {MAX_SOURCE} characters are not supported")
        return [f"call_{index}: {self.inner_call(tool.name, ' '.join(arguments))}", *rules]


def parameter_schema(parameters: Any, name: str) -> Any:
    """The schema of one parameter."""
    return _named(parameters).get(name, parameters.get("additionalProperties", {}))


def _offered(parameters: Mapping[str, Any]) -> Iterator[tuple[str | None, Any]]:
    """The names that a grammar offers, in its order, with their schemas. None stands for any other name."""
    for name in dict.fromkeys([*_named(parameters), *_required(parameters)]):
        schema = parameter_schema(parameters, name)
        if schema is not False:
            yield name, schema
    others = parameters.get("additionalProperties", {})
    if others is not False:
        yield None, others


def _place(name: str | None) -> str:
    if name is None:
        return "/additionalProperties"
    return f"/properties/{escaped_name(name)}"


def _name_rule(name: str | None, parameters: Mapping[str, Any]) -> str:
    """Lark for ``name``; if that is None, for a name that ``parameters`` does not have."""
    if name is not None:
        return json.dumps(name)
    return other_than(_NAME, [*_named(parameters), *_required(parameters)])


def _check_whole(tool: Tool) -> None:
    """Raises UnsupportedSchema if there is more to a schema than one argument after the other."""
    parameters = tool.parameters
    keywords = _OF_ALL & parameters.keys()
    if parameters.get("minProperties", 0) <= len(set(_required(parameters))):
        keywords -= {"minProperties"}
    if "object" not in named_types(parameters.get("type", "object")):
        keywords |= {"type"}
    for keyword in sorted(keywords):
        raise _refusal(tool, f"/{keyword}", f"the keyword '{keyword}' is not supported for all arguments")
    for name in [*_named(parameters), *_required(parameters)]:
        if not _is_plain(name):
            raise _refusal(tool, "/properties", f"the name {name!r} is not supported")


def _refusal(tool: Tool, place: str, problem: str) -> UnsupportedSchema:
    return UnsupportedSchema(
        f"Invalid schema in '{tool.param}' at '{place}': {problem} where arguments are elements of text, "
        "as in this model's calls.",
        param=tool.param,
    )


def _named(parameters: Any) -> Mapping[str, Any]:
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties if isinstance(properties, dict) else {}


def _required(parameters: Mapping[str, Any]) -> list[str]:
    required = parameters.get("required")
    names = required if isinstance(required, list) else []
    return [name for name in names if isinstance(name, str)]


def _is_plain(name: str) -> bool:
    """Whether a reader finds ``name`` as it was written."""
    return bool(re.fullmatch(_NAME, name)) and name.isprintable()


def _type_alone(schema: Any, root: Any) -> Any:
    types = types_of(schema, root)
    return schema is not False and ({"type": names_of(types)} if types and types != EVERY else {})
