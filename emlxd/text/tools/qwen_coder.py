"""Qwen3-Coder: an element for each call and each parameter."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from emlxd.core import Tool
from emlxd.text.reader import Steps
from emlxd.text.tools.format import Format, Malformed, one_of_calls
from emlxd.text.tools.json_calls import series
from emlxd.text.tools.parameters import ParameterReader, argument_names, parameter_schema, value_rules

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class QwenCoderReader(ParameterReader):
    def read_calls(self, trigger: str) -> Steps[None]:
        if trigger == _OPEN:
            yield from self.skip_space()
            yield from self.expect(_FUNCTION)
        name = yield from self.before(">")
        self.begin_arguments(name)
        while True:
            yield from self.skip_space()
            if (yield from self.skip(_FUNCTION_END)):
                break
            yield from self.expect(_PARAMETER)
            yield from self._parameter()
        self.end_arguments()
        yield from self.skip_space()
        closed = yield from self.skip(_CLOSE)
        if trigger == _OPEN and not closed and (yield from self.more()):
            raise Malformed

    def _parameter(self) -> Steps[None]:
        name = yield from self.before(">")
        value = yield from self.before(_PARAMETER_END)
        self.argument(name, value.removeprefix("\n").removesuffix("\n"))


class QwenCoder(Format):
    name = "qwen-coder"
    markers = (_OPEN, _CLOSE)

    def knows(self, template: str) -> bool:
        return _FUNCTION in template and _PARAMETER in template

    def reader(self, tools: Sequence[Tool]) -> QwenCoderReader:
        return QwenCoderReader(tools, [_OPEN, _FUNCTION])  # the outer tag is often forgotten

    def rules(self, tools: Sequence[Tool], mark: Callable[[str], str], *, parallel: bool) -> str:
        tagged = f'call: {mark(_OPEN)} "\\n" ({one_of_calls(tools)}) "\\n" {mark(_CLOSE)}'
        rules = [series("call", '"\\n"', parallel=parallel), tagged]
        for index, tool in enumerate(tools):
            rules += _tool_rules(index, tool)
        return "\n".join(rules)


def _tool_rules(index: int, tool: Tool) -> list[str]:
    required = tool.parameters.get("required", ())
    items, rules = [], []
    for number, name in enumerate(argument_names(tool.parameters)):
        rule = f"value_{index}_{number}"
        items.append(
            f"({json.dumps(f'<parameter={name}>' + chr(10))} {rule}){'' if name in required else '?'}"
        )
        rules += value_rules(
            rule, parameter_schema(tool.parameters, name), json.dumps(f"\n{_PARAMETER_END}\n")
        )
    return [f'call_{index}: "<function={tool.name}>\\n" {" ".join(items)} "{_FUNCTION_END}"', *rules]
