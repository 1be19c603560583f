"""Calls as JSON objects: ``{"name": ..., "arguments": {...}}``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from emlxd.core import Tool
from emlxd.text.grammar import embedded_schema
from emlxd.text.reader import Steps
from emlxd.text.tools.format import MAX_CALLS, CallReader, Malformed, one_of_calls
from emlxd.text.tools.json_text import escaped, parsed

_ARGUMENTS: Final = ("arguments", "parameters")
_OTHERS: Final = ("type", "id")
CLOSERS: Final = {"{": "}", "[": "]"}


class JsonCallReader(CallReader):
    """Reads calls that are JSON objects."""

    def read_call(self) -> Steps[None]:
        """One object. A call is known by its name, so arguments that come first have to wait."""
        yield from self.expect("{")
        name = ""
        early: list[str] = []
        done = False
        while True:
            key = yield from self._key()
            if key == "name" and not name:
                name = yield from self._string()
                self.begin_call(name)
                if early:
                    self._complete("".join(early))
            elif key in _ARGUMENTS and not done:
                done = True
                yield from self._arguments(early if not name else None)
            elif key in _OTHERS:
                yield from self.value(lambda _: None)
            else:
                raise Malformed
            yield from self.skip_space()
            if (yield from self.skip("}")):
                break
            yield from self.expect(",")
        if not (name and done):
            raise Malformed

    def read_calls_in_array(self) -> Steps[None]:
        """A JSON array of objects."""
        yield from self.expect("[")
        while True:
            yield from self.skip_space()
            yield from self.read_call()
            yield from self.skip_space()
            if (yield from self.skip("]")):
                return
            yield from self.expect(",")

    def value(self, sink: Callable[[str], None]) -> Steps[None]:
        """A JSON value to ``sink``, as it comes. Where it ends is checked, not what is in it."""
        first = yield from self.peek()
        if first not in ('"', "{", "["):
            sink((yield from self.scalar()))
            return
        closers: list[str] = []
        in_string = escaped = False
        start = self._at
        while True:
            if self._at == len(self._text):
                sink(self._text[start:])
                start = self._at
                if not (yield from self.more()):
                    raise Malformed
            character = self._text[self._at]
            self._at += 1
            if in_string:
                in_string = escaped or character != '"'
                escaped = character == "\\" and not escaped
            elif character == '"':
                in_string = True
            elif character in CLOSERS:
                closers.append(CLOSERS[character])
            elif character in "]}" and closers.pop() != character:
                raise Malformed
            if not closers and not in_string:
                break
        sink(self._text[start : self._at])

    def scalar(self) -> Steps[str]:
        """The text of a number or a word, up to what may follow it in JSON."""
        start = self._at
        while (yield from self.peek()) not in ("", *",]} \r\n\t"):
            self._at += 1
        if self._at == start:
            raise Malformed
        return self._text[start : self._at]

    def object_arguments(self) -> Steps[None]:
        """A JSON object, as the arguments of the call that was begun."""
        if (yield from self.peek()) != "{":
            raise Malformed
        parts: list[str] = []

        def sink(text: str) -> None:
            parts.append(text)
            self.arguments(text)

        yield from self.value(sink)
        if not self.held:
            _checked("".join(parts))

    def _arguments(self, early: list[str] | None) -> Steps[None]:
        if early is None and (yield from self.peek()) == "{":
            yield from self.object_arguments()
            return
        parts: list[str] = []
        yield from self.value(parts.append)
        text = "".join(parts)
        if text.startswith('"'):  # an object as the text of a string
            text = escaped(read_json(text))
        if early is None:
            self._complete(text)
        else:
            early.append(text)

    def _complete(self, text: str) -> None:
        _checked(text)
        self.arguments(text)

    def _key(self) -> Steps[str]:
        yield from self.skip_space()
        key = yield from self._string()
        yield from self.skip_space()
        yield from self.expect(":")
        yield from self.skip_space()
        return key

    def _string(self) -> Steps[str]:
        if (yield from self.peek()) != '"':
            raise Malformed
        parts: list[str] = []
        yield from self.value(parts.append)
        return str(read_json("".join(parts)))


def read_json(text: str) -> Any:
    """Its value. Raises Malformed."""
    try:
        return parsed(text, nearest=True)
    except ValueError:
        raise Malformed from None


def _checked(text: str) -> None:
    if not isinstance(read_json(text), dict):
        raise Malformed


def call_rules(tools: Sequence[Tool], arguments: str = "arguments") -> str:
    """The rule ``call``: an object with the name of one of ``tools`` and arguments of its schema."""
    rules = [f"call: {one_of_calls(tools)}", "SPACE: /[ \\n]{0,4}/"]
    for index, tool in enumerate(tools):
        head = " SPACE ".join(
            ['"{"', _quoted("name"), '":"', _quoted(tool.name), '","', _quoted(arguments), '":"']
        )
        rules += [
            f"call_{index}: HEAD_{index} arguments_{index} TAIL",
            f"HEAD_{index}: {head} SPACE",
            f"arguments_{index}: {embedded_schema(tool.parameters)}",
        ]
    return "\n".join([*rules, 'TAIL: SPACE "}"'])


def series(one: str, separator: str, *, parallel: bool, rule: str = "calls") -> str:
    """The rule ``rule``: the item ``one`` once or, if ``parallel``, more often."""
    more = f" ({separator} {one}){{0,{MAX_CALLS - 1}}}" if parallel else ""
    return f"{rule}: {one}{more}"


def _quoted(text: str) -> str:
    """Lark for ``text`` as a JSON string."""
    return json.dumps(json.dumps(text))
