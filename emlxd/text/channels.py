"""The text of one answer, split into content, thinking and tool calls."""

from __future__ import annotations

from collections.abc import Iterable

from emlxd.core import Shape
from emlxd.text.reader import Read, Text
from emlxd.text.thinking import ThinkingReader
from emlxd.text.tools.table import FORMATS


class Channels:
    """Reads thinking first, and tool calls in what follows it."""

    def __init__(self, shape: Shape) -> None:
        self.calls = FORMATS[shape.call_format].reader(shape.tools) if shape.call_format else None
        self._thinking = ThinkingReader(shape.thinking) if shape.thinking else None
        self._readers = [reader for reader in (self._thinking, self.calls) if reader]
        self._end = 0
        self._before_content = 0

    @property
    def plain(self) -> bool:
        """Whether all text is content."""
        return not self._readers

    @property
    def thinking(self) -> bool:
        """Whether what comes next is thinking, as far as is known."""
        return any(reader.thinking for reader in self._readers)

    def push(self, text: str) -> list[Read]:
        """What became certain with ``text``; ends count from the start of the answer."""
        self._end += len(text)
        if self._thinking:
            return self._read_calls(self._thinking.push(text))
        return self._read_calls([Text(text, "content", self._end)])

    def finish(self, *, cut: bool) -> list[Read]:
        """The rest of an answer that came to its end, or was ``cut`` off."""
        rest = self._read_calls(self._thinking.finish()) if self._thinking else []
        return rest + (self._placed(self.calls.finish(cut=cut)) if self.calls else [])

    def _read_calls(self, reads: Iterable[Read]) -> list[Read]:
        if self.calls is None:
            return [*reads]
        out: list[Read] = []
        for read in reads:
            if isinstance(read, Text) and read.channel == "content":
                self._before_content = read.end - self.calls.received - len(read.text)
                out += self._placed(self.calls.push(read.text))
            else:
                out.append(read)
        return out

    def _placed(self, reads: Iterable[Read]) -> list[Read]:
        """The same with ``end`` counted in the answer instead of in its content."""
        shift = self._before_content
        return [Text(r.text, r.channel, r.end + shift) if isinstance(r, Text) else r for r in reads]
