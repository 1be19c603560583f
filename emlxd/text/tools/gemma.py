"""Gemma: arguments nearly as JSON, with names as they are and strings between marks of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from emlxd.core import Tool
from emlxd.text.json_schema import UnsupportedSchema
from emlxd.text.reader import Steps
from emlxd.text.tools.format import Format, Malformed, TriggeredReader, one_of_calls
from emlxd.text.tools.gemma_values import ValueRules, any_value_rules
from emlxd.text.tools.json_calls import CLOSERS, JsonCallReader, read_json, series
from emlxd.text.tools.json_text import written
from emlxd.text.tools.raw_strings import Unenforceable

_CALL: Final = "call:"
_NO_NAME: Final = frozenset('{}[]<>,"\n')


class GemmaReader(JsonCallReader, TriggeredReader):
    """Passes arguments on as JSON."""

    def __init__(self, tools: Sequence[Tool], open: str, close: str, quote: str) -> None:
        super().__init__(tools, [open])
        self._close, self._quote = close, quote

    def read_calls(self, trigger: str) -> Steps[None]:
        yield from self.skip_space()
        yield from self.expect(_CALL)
        self.begin_call((yield from self.before("{")).strip())
        yield from self._members()
        yield from self.close_with(self._close)

    def _members(self) -> Steps[None]:
        """An object, of which the brace has been read."""
        self.arguments("{")
        within, first = ["{"], True
        while within:
            yield from self.skip_space()
            if (yield from self.skip(CLOSERS[within[-1]])):
                self.arguments(CLOSERS[within.pop()])
                first = False
                continue
            if not first:
                yield from self.expect(",")
                yield from self.skip_space()
                self.arguments(", ")
            if within[-1] == "{":
                self.arguments(f"{written((yield from self._name()))}: ")
            opened = yield from self.follows(*CLOSERS)
            if opened:
                self._at += 1
                within.append(opened)
                self.arguments(opened)
            else:
                self.arguments((yield from self._single()))
            first = bool(opened)

    def _name(self) -> Steps[str]:
        if (yield from self.skip(self._quote)):
            name = yield from self.before(self._quote)
            yield from self.skip_space()
            yield from self.expect(":")
        else:
            name = (yield from self.before(":")).strip()
            if not name or _NO_NAME.intersection(name):
                raise Malformed
        yield from self.skip_space()
        return name

    def _single(self) -> Steps[str]:
        """The JSON of a value that has no others in it."""
        if (yield from self.skip(self._quote)):
            return written((yield from self.before(self._quote)))
        return written(read_json((yield from self.scalar())))


class Gemma(Format):
    """A format of this kind, by its marks; ``quote`` is around strings."""

    raw = True

    def __init__(self, name: str, open: str, close: str, quote: str) -> None:
        self.name = name
        self.markers = (open, close, quote)
        self._open, self._close, self._quote = open, close, quote

    def knows(self, template: str) -> bool:
        return self._open in template and self._quote in template

    def reader(self, tools: Sequence[Tool]) -> GemmaReader:
        return GemmaReader(tools, self._open, self._close, self._quote)

    def rules(self, tools: Sequence[Tool], mark: Callable[[str], str], *, parallel: bool) -> str:
        """Raises UnsupportedSchema for a tool whose arguments cannot be enforced in this way to write."""
        quote = mark(self._quote)
        rules = [
            series("call", "", parallel=parallel),
            f"call: {mark(self._open)} ({one_of_calls(tools)}) {mark(self._close)}",
            *any_value_rules(quote, self._quote),
        ]
        for index, tool in enumerate(tools):
            values = ValueRules(tool.parameters, f"value_{index}", quote, self._quote)
            try:
                arguments = values.whole()
            except Unenforceable as error:
                raise UnsupportedSchema(
                    f"Invalid schema in '{tool.param}' at {error} in this model's calls.", param=tool.param
                ) from None
            rules += [f'call_{index}: "{_CALL}{tool.name}" {arguments}', *values.rules]
        return "\n".join(rules)


GEMMA: Final = Gemma("gemma", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA: Final = Gemma("function-gemma", "<start_function_call>", "<end_function_call>", "<escape>")
