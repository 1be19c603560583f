"""DeepSeek: V3 and R1 fence the arguments as a code block, V3.1 writes them as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from emlxd.core import Tool
from emlxd.text.grammar import embedded_schema
from emlxd.text.reader import Steps
from emlxd.text.tools.format import CallReader, Format, TriggeredReader, one_of_calls
from emlxd.text.tools.json_calls import JsonCallReader, series

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
_SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
_FENCE: Final = "```json\n"


class DeepSeekReader(JsonCallReader, TriggeredReader):
    def read_calls(self, trigger: str) -> Steps[None]:
        while True:
            yield from self.skip_space()
            yield from self.expect(_CALL)
            yield from self._call()
            yield from self.skip_space()
            if not (yield from self.more()) or (yield from self.skip(_CALLS_END)):
                return

    def _call(self) -> Steps[None]:
        first = yield from self.before(_SEPARATOR)
        fenced = first == "function"
        name = (yield from self.before("\n")) if fenced else first
        self.begin_call(name)
        if fenced:
            yield from self.expect(_FENCE)
        yield from self.object_arguments()
        if fenced:
            yield from self.expect("\n```")
        yield from self.close_with(_CALL_END)


class DeepSeek(Format):
    """``fenced`` is how V3 and R1 write."""

    markers = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR)

    def __init__(self, name: str, *, fenced: bool) -> None:
        self.name = name
        self._fenced = fenced

    def knows(self, template: str) -> bool:
        return _CALLS in template and ("```json" in template) == self._fenced

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return DeepSeekReader(tools, [_CALLS])

    def rules(self, tools: Sequence[Tool], mark: Callable[[str], str], *, parallel: bool) -> str:
        separator = '"\\n"' if self._fenced else ""
        rules = [
            f"calls: {mark(_CALLS)} items {mark(_CALLS_END)}",
            series("call", separator, parallel=parallel, rule="items"),
            f"call: {mark(_CALL)} ({one_of_calls(tools)}) {mark(_CALL_END)}",
        ]
        for index, tool in enumerate(tools):
            name, arguments = tool.name, f"arguments_{index}"
            rules += [
                f'call_{index}: "function" {mark(_SEPARATOR)} "{name}\\n```json\\n" {arguments} "\\n```"'
                if self._fenced
                else f'call_{index}: "{name}" {mark(_SEPARATOR)} {arguments}',
                f"{arguments}: {embedded_schema(tool.parameters)}",
            ]
        return "\n".join(rules)


DEEPSEEK_V3 = DeepSeek("deepseek-v3", fenced=True)
DEEPSEEK_V31 = DeepSeek("deepseek-v31", fenced=False)
