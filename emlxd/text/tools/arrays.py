"""Granite 3, Phi-4 and the older Mistral: one JSON array with all calls, after a mark."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emlxd.core import Tool
from emlxd.text.reader import Steps
from emlxd.text.tools.format import CallReader, Format, TriggeredReader
from emlxd.text.tools.json_calls import JsonCallReader, call_rules, series


class ArrayReader(JsonCallReader, TriggeredReader):
    """``close`` is the mark at the end, "" if there is none."""

    def __init__(self, tools: Sequence[Tool], open: str, close: str) -> None:
        super().__init__(tools, [open])
        self._close = close

    def read_calls(self, trigger: str) -> Steps[None]:
        yield from self.skip_space()
        yield from self.read_calls_in_array()
        if self._close:
            yield from self.close_with(self._close)


class Arrays(Format):
    """A format of this kind, by its marks."""

    def __init__(self, name: str, open: str, close: str = "") -> None:
        self.name = name
        self.markers = tuple(filter(None, (open, close)))
        self._open = open
        self._close = close

    def knows(self, template: str) -> bool:
        return all(marker in template for marker in self.markers)

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return ArrayReader(tools, self._open, self._close)

    def rules(self, tools: Sequence[Tool], mark: Callable[[str], str], *, parallel: bool) -> str:
        close = mark(self._close) if self._close else ""
        array = f'calls: {mark(self._open)} "[" items "]" {close}'
        items = series("call", '", "', parallel=parallel, rule="items")
        return "\n".join([array, items, call_rules(tools)])
