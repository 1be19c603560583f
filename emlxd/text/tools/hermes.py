"""Hermes, Qwen 2.5 and 3, Granite 4 and many more: an object between tags, a pair of tags a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emlxd.core import Tool
from emlxd.text.reader import Steps
from emlxd.text.tools.format import Format, TriggeredReader
from emlxd.text.tools.json_calls import JsonCallReader, call_rules, series

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesReader(JsonCallReader, TriggeredReader):
    def read_calls(self, trigger: str) -> Steps[None]:
        yield from self.skip_space()
        yield from self.read_call()
        yield from self.close_with(_CLOSE)


class Hermes(Format):
    name = "hermes"
    markers = (_OPEN, _CLOSE)

    def knows(self, template: str) -> bool:
        return _OPEN in template

    def reader(self, tools: Sequence[Tool]) -> HermesReader:
        return HermesReader(tools, [_OPEN])

    def rules(self, tools: Sequence[Tool], mark: Callable[[str], str], *, parallel: bool) -> str:
        tagged = f'tagged: {mark(_OPEN)} "\\n" call "\\n" {mark(_CLOSE)}'
        return "\n".join([series("tagged", '"\\n"', parallel=parallel), tagged, call_rules(tools)])
