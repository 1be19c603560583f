"""GLM 4.5 and later: the name, then pairs of keys and values."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from emlxd.core import Tool
from emlxd.text.reader import Steps
from emlxd.text.tools.format import Format, one_of_calls
from emlxd.text.tools.json_calls import series
from emlxd.text.tools.parameters import ParameterReader, argument_names, parameter_schema, value_rules

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


class GlmReader(ParameterReader):
    def read_calls(self, trigger: str) -> Steps[None]:
        yield from self.skip_space()
        start = self._at
        while (yield from self.peek()) not in ("", "\n", "<"):
            self._at += 1
        self.begin_arguments(self._text[start : self._at].strip())
        while True:
            yield from self.skip_space()
            if (yield from self.skip(_CLOSE)):
                break
            yield from self.expect(_KEY)
            yield from self._pair()
        self.end_arguments()

    def _pair(self) -> Steps[None]:
        key = yield from self.before(_KEY_END)
        yield from self.skip_space()
        yield from self.expect(_VALUE)
        value = yield from self.before(_VALUE_END)
        self.argument(key.strip(), value)


class Glm(Format):
    name = "glm"
    markers = (_OPEN, _CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END)

    def knows(self, template: str) -> bool:
        return _KEY in template and _VALUE in template

    def reader(self, tools: Sequence[Tool]) -> GlmReader:
        return GlmReader(tools, [_OPEN])

    def rules(self, tools: Sequence[Tool], mark: Callable[[str], str], *, parallel: bool) -> str:
        tagged = f"call: {mark(_OPEN)} ({one_of_calls(tools)}) {mark(_CLOSE)}"
        rules = [series("call", '"\\n"', parallel=parallel), tagged]
        for index, tool in enumerate(tools):
            rules += _tool_rules(index, tool, mark)
        return "\n".join(rules)


def _tool_rules(index: int, tool: Tool, mark: Callable[[str], str]) -> list[str]:
    required = tool.parameters.get("required", ())
    items, rules = [], []
    for number, name in enumerate(argument_names(tool.parameters)):
        rule = f"value_{index}_{number}"
        pair = f'{mark(_KEY)} {json.dumps(name)} {mark(_KEY_END)} "\\n" {mark(_VALUE)} {rule} "\\n"'
        items.append(f"({pair}){'' if name in required else '?'}")
        rules += value_rules(rule, parameter_schema(tool.parameters, name), mark(_VALUE_END))
    return [f'call_{index}: "{tool.name}\\n" {" ".join(items)}', *rules]
