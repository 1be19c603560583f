"""Mistral: an array after ``[TOOL_CALLS]``, or, since version 11 of its tokenizer, a mark, a name,
``[ARGS]`` and the arguments for each call. Both are read, whichever the model was taught."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence

from emlxd.core import Tool
from emlxd.text.grammar import embedded_schema
from emlxd.text.reader import Steps
from emlxd.text.tools.format import Format, TriggeredReader, one_of_calls
from emlxd.text.tools.json_calls import JsonCallReader, call_rules, series

_CALLS, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def new_id() -> str:
    """Mistral's templates take ids of nine letters and digits only."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class MistralReader(JsonCallReader, TriggeredReader):
    def read_calls(self, trigger: str) -> Steps[None]:
        yield from self.skip_space()
        if (yield from self.peek()) == "[":
            yield from self.read_calls_in_array()
        else:
            yield from self._named_call()

    def _named_call(self) -> Steps[None]:
        start = self._at
        while (yield from self.peek()) not in ("", "[", "{"):
            self._at += 1
        self.begin_call(self._text[start : self._at].strip())
        if (yield from self.skip(_ID)):
            while (yield from self.peek()) not in ("", "["):
                self._at += 1
        yield from self.skip(_ARGS)
        yield from self.skip_space()
        yield from self.object_arguments()


class Mistral(Format):
    name = "mistral"
    markers: tuple[str, ...] = (_CALLS,)

    def knows(self, template: str) -> bool:
        return _CALLS in template and _ARGS not in template

    def reader(self, tools: Sequence[Tool]) -> MistralReader:
        return MistralReader(tools, [_CALLS], new_id)

    def rules(self, tools: Sequence[Tool], mark: Callable[[str], str], *, parallel: bool) -> str:
        array = f'calls: {mark(_CALLS)} "[" items "]"'
        items = series("call", '", "', parallel=parallel, rule="items")
        return "\n".join([array, items, call_rules(tools)])


class NamedMistral(Mistral):
    name = "mistral-args"
    markers = (_CALLS, _ARGS, _ID)

    def knows(self, template: str) -> bool:
        return _CALLS in template and _ARGS in template

    def rules(self, tools: Sequence[Tool], mark: Callable[[str], str], *, parallel: bool) -> str:
        rules = [series("call", "", parallel=parallel), f"call: {one_of_calls(tools)}"]
        for index, tool in enumerate(tools):
            rules.append(f'call_{index}: {mark(_CALLS)} "{tool.name}" {mark(_ARGS)} arguments_{index}')
            rules.append(f"arguments_{index}: {embedded_schema(tool.parameters)}")
        return "\n".join(rules)
