"""Qwen3-Coder: an element for each call and each parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emlxd.core import Tool
from emlxd.text.reader import Steps
from emlxd.text.tools.format import Malformed
from emlxd.text.tools.parameters import ParameterFormat, ParameterReader

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class QwenCoderReader(ParameterReader):
    def read_calls(self, trigger: str) -> Steps[None]:
        if trigger == _OPEN:
            yield from self.skip_space()
            yield from self.expect(_FUNCTION)
        name = yield from self.before(">")
        yield from self.read_arguments(name, _PARAMETER, _FUNCTION_END, self._parameter)
        yield from self.skip_space()
        closed = yield from self.skip(_CLOSE)
        if trigger == _OPEN and not closed and (yield from self.more()):
            raise Malformed

    def _parameter(self) -> Steps[None]:
        name = yield from self.before(">")
        value = yield from self.value_text(name, _PARAMETER_END)
        self.argument(name, value.removeprefix("\n").removesuffix("\n"))


class QwenCoder(ParameterFormat):
    name = "qwen-coder"
    markers = (_OPEN, _CLOSE)
    value_mark = _PARAMETER_END

    def knows(self, template: str) -> bool:
        return _FUNCTION in template and _PARAMETER in template

    def reader(self, tools: Sequence[Tool]) -> QwenCoderReader:
        return QwenCoderReader(tools, [_OPEN, _FUNCTION])  # the outer tag is often forgotten

    def key(self, name: str) -> str:
        return f'"{_PARAMETER}" {name} ">\\n"'

    def end(self, mark: Callable[[str], str]) -> str:
        return f'"\\n{_PARAMETER_END}\\n"'

    def call(self, calls: str, mark: Callable[[str], str]) -> str:
        return f'{mark(_OPEN)} "\\n" ({calls}) "\\n" {mark(_CLOSE)}'

    def inner_call(self, name: str, arguments: str) -> str:
        return f'"{_FUNCTION}{name}>\\n" {arguments} "{_FUNCTION_END}"'
