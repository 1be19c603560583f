"""GLM 4.5 and later: the name, then pairs of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emlxd.core import Tool
from emlxd.text.reader import Steps
from emlxd.text.tools.parameters import ParameterFormat, ParameterReader

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


class GlmReader(ParameterReader):
    def read_calls(self, trigger: str) -> Steps[None]:
        yield from self.skip_space()
        start = self._at
        while (yield from self.peek()) not in ("", "\n", "<"):
            self._at += 1
        name = self._text[start : self._at].strip()
        yield from self.read_arguments(name, _KEY, _CLOSE, self._pair)

    def _pair(self) -> Steps[None]:
        key = (yield from self.before(_KEY_END)).strip()
        yield from self.skip_space()
        yield from self.expect(_VALUE)
        self.argument(key, (yield from self.value_text(key, _VALUE_END)))


class Glm(ParameterFormat):
    name = "glm"
    markers = (_OPEN, _CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END)
    value_mark = _VALUE_END

    def knows(self, template: str) -> bool:
        return _KEY in template and _VALUE in template

    def reader(self, tools: Sequence[Tool]) -> GlmReader:
        return GlmReader(tools, [_OPEN])

    def key(self, name: str) -> str:
        return name

    def argument(self, key: str, value: str, mark: Callable[[str], str]) -> str:
        return f'{mark(_KEY)} {key} {mark(_KEY_END)} "\\n" {mark(_VALUE)} {value} "\\n"'

    def end(self, mark: Callable[[str], str]) -> str:
        return mark(_VALUE_END)

    def call(self, calls: str, mark: Callable[[str], str]) -> str:
        return f"{mark(_OPEN)} ({calls}) {mark(_CLOSE)}"

    def inner_call(self, name: str, arguments: str) -> str:
        return f'"{name}\\n" {arguments}'
