"""MiniMax M2: an element for each call and each parameter, and one around all calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from emlxd.core import Tool
from emlxd.text.reader import Steps
from emlxd.text.tools.json_calls import series
from emlxd.text.tools.parameters import ParameterFormat, ParameterReader

_OPEN, _CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
_CALL, _CALL_END = '<invoke name="', "</invoke>"
_PARAMETER, _PARAMETER_END = '<parameter name="', "</parameter>"
_NAME_END = '">'


class MiniMaxReader(ParameterReader):
    def read_calls(self, trigger: str) -> Steps[None]:
        yield from self.skip_space()
        yield from self.expect(_CALL)
        yield from self._call()
        while True:
            yield from self.skip_space()
            if not (yield from self.skip(_CALL)):
                break
            yield from self._call()
        yield from self.close_with(_CLOSE)

    def _call(self) -> Steps[None]:
        name = yield from self.before(_NAME_END)
        yield from self.read_arguments(name, _PARAMETER, _CALL_END, self._parameter)

    def _parameter(self) -> Steps[None]:
        name = yield from self.before(_NAME_END)
        self.argument(name, (yield from self.value_text(name, _PARAMETER_END)))


class MiniMax(ParameterFormat):
    name = "minimax"
    markers = (_OPEN, _CLOSE)
    value_mark = _PARAMETER_END

    def knows(self, template: str) -> bool:
        return _OPEN in template

    def reader(self, tools: Sequence[Tool]) -> MiniMaxReader:
        return MiniMaxReader(tools, [_OPEN])

    def key(self, name: str) -> str:
        return f"{json.dumps(_PARAMETER)} {name} {json.dumps(_NAME_END)}"

    def end(self, mark: Callable[[str], str]) -> str:
        return f'"{_PARAMETER_END}\\n"'

    def series(self, mark: Callable[[str], str], *, parallel: bool) -> list[str]:
        all_calls = f'calls: {mark(_OPEN)} "\\n" items {mark(_CLOSE)}'
        return [all_calls, series("call", "", parallel=parallel, rule="items")]

    def inner_call(self, name: str, arguments: str) -> str:
        return f'{json.dumps(f"{_CALL}{name}{_NAME_END}")} "\\n" {arguments} "{_CALL_END}\\n"'
