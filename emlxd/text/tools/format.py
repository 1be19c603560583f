"""What a tool-call format is, and what reading one has in common."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from emlxd.core import Tool
from emlxd.text.reader import Call, Read, Reader, Steps

MAX_CALLS = 16
"""As many calls as a grammar allows in one answer."""


class Malformed(Exception):
    """What looked like a tool call is not one."""


class Format(ABC):
    """One way to write tool calls."""

    name: str
    markers: Sequence[str]
    """The texts of calls that may be special tokens, which would not count as text otherwise."""

    writes_all = False
    """Whether thinking and answers are written in it too."""

    raw = False
    """Whether arguments are written as they are, not as JSON: not every schema can be enforced then."""

    @abstractmethod
    def knows(self, template: str) -> bool:
        """Whether a chat template teaches this format."""

    @abstractmethod
    def reader(self, tools: Sequence[Tool]) -> CallReader: ...

    @abstractmethod
    def rules(self, tools: Sequence[Tool], mark: Callable[[str], str], *, parallel: bool) -> str:
        """A Lark grammar whose rule ``calls`` is one call or, if ``parallel``, more.

        ``mark`` gives what stands in Lark for one of the ``markers``.
        """

    def freed(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """A schema to enforce in place of one that cannot be."""
        return {"type": "object"}

    def final_rules(self, body: str, mark: Callable[[str], str]) -> str:
        """A Lark grammar whose rule ``final`` is an answer of the rule ``body``."""
        return f"final: {body}"

    def end_of_thinking(self, *, held: bool) -> str:
        """Of a format that ``writes_all``. ``held``: a grammar says how the answer after it begins."""
        raise NotImplementedError


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def one_of_calls(tools: Sequence[Tool]) -> str:
    """Lark for a call of any tool, where each has a rule of its own: ``call_0 | call_1``."""
    return " | ".join(f"call_{index}" for index in range(len(tools)))


class CallReader(Reader):
    """Text and tool calls.

    A call is passed on when it is complete and valid, otherwise its text is, as it came. If calls are
    ``held`` to a grammar they cannot turn out malformed, and are passed on as they come. If they are
    ``alone`` there is no text beside them.
    """

    def __init__(self, tools: Sequence[Tool], new_id: Callable[[], str] = new_id) -> None:
        super().__init__()
        self.tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self.calls = 0
        self.malformed = 0
        self.held = False
        self.alone = False
        self.thinking = False
        self._new_id = new_id
        self._entered: int | None = None
        self._trial: list[Call] = []

    @property
    def entered(self) -> str | None:
        """What was read of a call that has begun and not ended, or None."""
        return None if self._entered is None else self._text[self._entered :]

    def hold(self, *, alone: bool = False) -> list[Read]:
        """From now on calls are held to a grammar. Gives what is known of the call that has begun."""
        self.held, self.alone = True, alone
        held, self._trial = self._trial, []
        return [*held]

    def begin_call(self, name: str) -> None:
        if name not in self.tools:
            raise Malformed
        if self._entered is None:
            self._entered = 0
        self._emit(Call(self.calls, "", self._new_id(), name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the call that was begun last."""
        if text:
            self._emit(Call(self.calls - 1, text))

    def commit(self) -> None:
        """Passes on what has been read since the call began: it is one."""
        self._out += self._trial
        self._trial, self._entered = [], None

    def abandon(self) -> None:
        """What has begun is not a call. One that was passed on already remains."""
        if self._entered is not None:
            self.malformed += 1
        self.calls -= sum(call.name is not None for call in self._trial)
        self._trial, self._entered = [], None

    def expect(self, literal: str) -> Steps[None]:
        if not (yield from self.skip(literal)):
            raise Malformed

    def close_with(self, *marks: str) -> Steps[None]:
        """Reads one of the marks at the end of a call. At the end of an answer models forget it."""
        yield from self.skip_space()
        if (yield from self.more()):
            yield from self.expect((yield from self.follows(*marks)) or marks[0])

    def before(self, mark: str) -> Steps[str]:
        text = yield from self.until(mark)
        if text is None:
            raise Malformed
        return text

    def _emit(self, call: Call) -> None:
        (self._out if self.held else self._trial).append(call)


class TriggeredReader(CallReader):
    """Calls that begin with a mark. White space around them is no text."""

    openers: tuple[str, ...] = ()
    """What may begin a call at the start of an answer. It is left to ``read_calls`` to read."""

    def __init__(
        self, tools: Sequence[Tool], triggers: Sequence[str], new_id: Callable[[], str] = new_id
    ) -> None:
        super().__init__(tools, new_id)
        self._triggers = triggers

    @property
    def awaits_mark(self) -> bool:
        return self.alone or self.calls > 0

    @abstractmethod
    def read_calls(self, trigger: str) -> Steps[None]:
        """Reads what follows ``trigger``, up to the end of its call or calls. Raises Malformed."""

    def rules(self) -> Steps[None]:
        yield from self.skip_space()
        opener = yield from self.follows(*self.openers)
        if opener:
            yield from self._try_calls(opener, self._at)
        else:
            self._at = 0
        while trigger := (yield from self.pass_text("content", *self._triggers, trim=" \r\n\t")):
            self._entered = self._at - len(trigger)
            yield from self._try_calls(trigger, self._at)
        if not (self.calls or (self._cut and self.alone)):
            self._pass(self.unread(), "content")

    def _try_calls(self, trigger: str, start: int) -> Steps[None]:
        try:
            yield from self.read_calls(trigger)
        except Malformed:
            self.abandon()
            if not self.held:
                self._at = 0
                self._pass(self._text[:start], "content")
            return
        self.commit()
        yield from self.skip_space()
        self.drop()
