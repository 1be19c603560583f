"""Reading a text that comes in pieces, written as if all of it were there.

A reader's rules are generators: where one needs more text it yields, and goes on when there is some.
So how a text was cut into pieces cannot change what is read from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from emlxd.core import Channel

T = TypeVar("T")
Steps = Generator[None, None, T]


@dataclass(frozen=True, slots=True)
class Text:
    """Text that the client sees. ``end`` is where it ends in what was read, in characters."""

    text: str
    channel: Channel
    end: int


@dataclass(frozen=True, slots=True)
class Call:
    """A part of the tool call number ``call``: the first has ``id`` and ``name``, the others arguments."""

    call: int
    arguments: str
    id: str | None = None
    name: str | None = None


Read = Text | Call


class Reader(ABC):
    """Turns pieces of text into what they mean."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._dropped = 0
        self._ended = self._cut = False
        self._out: list[Read] = []
        self._rules = self.rules()

    @abstractmethod
    def rules(self) -> Steps[None]:
        """Reads everything, up to the end."""

    def push(self, text: str) -> list[Read]:
        """What became certain with this piece."""
        self._text += text
        return self._advance()

    def finish(self, *, cut: bool = False) -> list[Read]:
        """The rest, which may have been ``cut`` off. Nothing may be pushed after it."""
        self._ended, self._cut = True, cut
        return self._advance()

    def _advance(self) -> list[Read]:
        next(self._rules, None)
        out, self._out = self._out, []
        return out

    # What follows is for rules.

    @property
    def awaits_mark(self) -> bool:
        """Whether a mark was to come: its beginning, if that is where text was cut off, is no text."""
        return False

    @property
    def position(self) -> int:
        """How many characters have been read."""
        return self._dropped + self._at

    @property
    def received(self) -> int:
        """How many characters have come."""
        return self._dropped + len(self._text)

    def drop(self) -> None:
        """Forgets the text that has been read: no rule goes back behind here."""
        self._dropped += self._at
        self._text, self._at = self._text[self._at :], 0

    def unread(self) -> str:
        return self._text[self._at :]

    def more(self) -> Steps[bool]:
        """Waits for text after the current position. False at the end."""
        while self._at >= len(self._text):
            if self._ended:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """The next character, "" at the end."""
        return self._text[self._at] if (yield from self.more()) else ""

    def follows(self, *options: str) -> Steps[str]:
        """The first of ``options`` that comes next, not yet read; "" if none does."""
        while not self._ended and _is_start(self.unread(), options):
            yield
        return next((option for option in options if self._text.startswith(option, self._at)), "")

    def skip(self, literal: str) -> Steps[bool]:
        """Reads ``literal`` if it comes next."""
        found = yield from self.follows(literal)
        self._at += len(found)
        return bool(found)

    def skip_space(self, characters: str = " \n\r\t") -> Steps[str]:
        start = self._at
        while (yield from self.more()) and self._text[self._at] in characters:
            self._at += 1
        return self._text[start : self._at]

    def until(self, mark: str) -> Steps[str | None]:
        """The text before ``mark``, which is read too. None if it does not come."""
        start = searched = self._at
        while (found := self._text.find(mark, searched)) < 0:
            searched = max(start, len(self._text) - len(mark) + 1)
            self._at = len(self._text)
            if not (yield from self.more()):
                return None
        self._at = found + len(mark)
        return self._text[start:found]

    def pass_text(self, channel: Channel, *marks: str, trim: str = "") -> Steps[str]:
        """Passes text on until one of ``marks``, which is read and returned; "" at the end.

        Characters of ``trim`` right before a mark or the end are not passed on.
        """
        while True:
            text = self.unread()
            found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
            whole = self._ended and not (self._cut and self.awaits_mark)
            held = 0 if whole else _held_back(text, marks)
            at, _, mark = min(found, default=(len(text) - held, 0, ""))
            passed = text[:at].rstrip(trim) if trim else text[:at]
            self._pass(passed, channel)
            if mark:
                self._at += at - len(passed) + len(mark)
            if mark or self._ended:
                return mark
            yield

    def _pass(self, text: str, channel: Channel) -> None:
        """Passes on what comes next, which is ``text``, and forgets it."""
        self._at += len(text)
        self.drop()
        if text:
            self._out.append(Text(text, channel, self.position))


def _is_start(text: str, options: tuple[str, ...]) -> bool:
    """Whether ``text`` may become one of ``options``."""
    return any(len(text) < len(option) and option.startswith(text) for option in options)


def _held_back(text: str, marks: tuple[str, ...]) -> int:
    """How many characters at the end of ``text`` may be the beginning of a mark."""
    longest = max((len(mark) - 1 for mark in marks), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
