"""Llama 3.x: a bare object at the start of the answer, or after ``<|python_tag|>``, where also a
``tool.call(name="value")`` may stand."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from emlxd.core import Tool
from emlxd.text.reader import Steps
from emlxd.text.tools.format import Format, Malformed, TriggeredReader
from emlxd.text.tools.json_calls import JsonCallReader, call_rules, series
from emlxd.text.tools.json_text import written

_PYTHON = "<|python_tag|>"


class LlamaReader(JsonCallReader, TriggeredReader):
    openers = ("{",)

    def read_calls(self, trigger: str) -> Steps[None]:
        yield from self.skip_space()
        if (yield from self.peek()) != "{":
            yield from self._python()
            return
        while True:
            yield from self.read_call()
            yield from self.skip_space()
            if not (yield from self.skip(";")):
                return
            yield from self.skip_space()

    def _python(self) -> Steps[None]:
        start = self._at
        while (yield from self.more()):
            self._at = len(self._text)
        name, arguments = _python_call(self._text[start:])
        self.begin_call(name)
        self.arguments(arguments)


def _python_call(code: str) -> tuple[str, str]:
    """The name and, as JSON, the arguments of ``name.call(key=value, ...)`` with literals for values."""
    try:
        match ast.parse(code.strip(), mode="eval").body:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="call"), args=[], keywords=keywords
            ):
                return name, written({str(word.arg): ast.literal_eval(word.value) for word in keywords})
            case _:
                raise Malformed
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        raise Malformed from None


class Llama(Format):
    name = "llama"
    markers = (_PYTHON,)

    def knows(self, template: str) -> bool:
        return _PYTHON in template or '{"name": function name, "parameters"' in template

    def reader(self, tools: Sequence[Tool]) -> LlamaReader:
        return LlamaReader(tools, [_PYTHON])

    def rules(self, tools: Sequence[Tool], mark: Callable[[str], str], *, parallel: bool) -> str:
        calls = series("call", '"; "', parallel=parallel).replace(":", f": {mark(_PYTHON)}?", 1)
        return "\n".join([calls, call_rules(tools, "parameters")])
