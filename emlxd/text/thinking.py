"""Thinking between tags, apart from the answer that follows it."""

from __future__ import annotations

from dataclasses import replace

from emlxd.core import Thinking
from emlxd.text.reader import Reader, Steps

_TAGS = (
    Thinking("<think>", "</think>"),
    Thinking("[THINK]", "[/THINK]"),
    Thinking("<seed:think>", "</seed:think>"),
    Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
    Thinking("<|channel>", "<channel|>", label="thought"),
)


def find_thinking(template: str, prompt: str) -> Thinking | None:
    """How an answer to ``prompt`` thinks, if the model's chat template knows of thinking."""
    for tags in _TAGS:
        if tags.close in template:
            end = prompt.rstrip()
            opened, closed = end.endswith(tags.open + tags.label), end.endswith(tags.close)
            return replace(tags, start="open" if opened else "closed" if closed else "undecided")
    return None


class ThinkingReader(Reader):
    """Thinking is only at the start of an answer: later the tags are text like any other.

    Line breaks at the borders of thinking belong to neither side.
    """

    def __init__(self, tags: Thinking) -> None:
        super().__init__()
        self._tags = tags
        self.thinking = tags.start == "open"

    def rules(self) -> Steps[None]:
        if self._tags.start == "undecided":
            yield from self._open()
        if self.thinking:
            yield from self._think()
        yield from self.pass_text("content")

    def _open(self) -> Steps[None]:
        yield from self.skip_space()
        self.thinking = yield from self.skip(self._tags.open)
        if not self.thinking:
            self._at = 0
        elif self._tags.label:
            yield from self.skip(self._tags.label)

    def _think(self) -> Steps[None]:
        yield from self.skip_space("\r\n")
        yield from self.pass_text("reasoning", self._tags.close, trim="\r\n")
        self.thinking = False
        yield from self.skip_space("\r\n")
        self.drop()
