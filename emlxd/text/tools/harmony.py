"""gpt-oss: every message has a channel, "analysis" for thinking and "final" for the answer; a call is a
message to ``functions.NAME``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from emlxd.core import Tool
from emlxd.text.grammar import embedded_schema
from emlxd.text.reader import Steps
from emlxd.text.tools.format import Format, Malformed, one_of_calls
from emlxd.text.tools.json_calls import JsonCallReader

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")


class HarmonyReader(JsonCallReader):
    def rules(self) -> Steps[None]:
        while (yield from self.more()):
            if not (yield from self.follows(_START, _CHANNEL)):
                mark = yield from self.pass_text("content", _START, _CHANNEL, *_ENDS)
                self._at -= 0 if mark in _ENDS else len(mark)
                continue
            start = self._at
            header = yield from self.until(_MESSAGE)
            if header is None:
                return
            yield from self._message(start, header)

    def _message(self, start: int, header: str) -> Steps[None]:
        recipient = re.search(r"to=functions\.([\w.-]+)", header)
        if recipient and recipient[1] in self.tools:
            yield from self._try_call(start, recipient[1])
            return
        self.thinking = f"{_CHANNEL}analysis" in header
        self.drop()
        yield from self.pass_text("reasoning" if self.thinking else "content", *_ENDS)
        self.thinking = False

    def _try_call(self, start: int, name: str) -> Steps[None]:
        body, self._entered = self._at, start
        self.begin_call(name)
        try:
            yield from self.object_arguments()
            yield from self.close_with(*_ENDS)
        except Malformed:
            self.abandon()
            self._at = self._at if self.held else body
            self.drop()
            yield from self.pass_text("content", *_ENDS)
        else:
            self.commit()
            self.drop()


class Harmony(Format):
    name = "harmony"
    writes_all = True
    markers = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)

    def knows(self, template: str) -> bool:
        return _CHANNEL in template and _MESSAGE in template

    def reader(self, tools: Sequence[Tool]) -> HarmonyReader:
        return HarmonyReader(tools)

    def rules(self, tools: Sequence[Tool], mark: Callable[[str], str], *, parallel: bool) -> str:
        """Thinking comes first, if at all. There is one call: the model waits for its result."""
        json_mark = f'(" " {mark(_CONSTRAIN)} "json" | " json")?'
        rules = [f"calls: analysis? ({one_of_calls(tools)})", analysis_rule(mark)]
        for index, tool in enumerate(tools):
            header = f'{mark(_CHANNEL)} "commentary to=functions.{tool.name}" {json_mark} {mark(_MESSAGE)}'
            rules.append(f"call_{index}: {header} arguments_{index}")
            rules.append(f"arguments_{index}: {embedded_schema(tool.parameters)}")
        return "\n".join(rules)

    def final_rules(self, body: str, mark: Callable[[str], str]) -> str:
        """Thinking, if any, comes before the answer."""
        head = f'{mark(_CHANNEL)} "final" (" " {mark(_CONSTRAIN)} "json" | " json")? {mark(_MESSAGE)}'
        return f"final: analysis? {head} {body}\n{analysis_rule(mark)}"

    def end_of_thinking(self, *, held: bool) -> str:
        end = f"{_ENDS[0]}{_START}assistant"
        return end if held else f"{end}{_CHANNEL}final{_MESSAGE}"


def analysis_rule(mark: Callable[[str], str]) -> str:
    """Lark for the rule ``analysis``, after which the next message's channel follows."""
    message = f'{mark(_CHANNEL)} "analysis" {mark(_MESSAGE)} ANALYSIS {mark(_ENDS[0])}'
    return f'analysis: {message} {mark(_START)} "assistant"\nANALYSIS: /(?s:.*)/'
