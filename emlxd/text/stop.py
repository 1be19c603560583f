"""Stop strings: found across any borders of the pieces, never returned."""

from __future__ import annotations


class StopMatcher:
    """Holds back text only while it may still become one of ``stops`` (none of them empty).

    The stop string that is complete first ends the text; of two that end together, the longer.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.matched: str | None = None
        self._stops = stops
        self._firsts = frozenset(stop[0] for stop in stops)
        self._held = ""

    def push(self, text: str) -> str:
        """The text that can no longer be part of a stop string; nothing after a match."""
        if self.matched is not None:
            return ""
        if not self._held and self._firsts.isdisjoint(text):
            return text
        text = self._held + text
        match = self._first_match(text)
        if match:
            end, length, self.matched = match
            self._held = ""
            return text[: end - length]
        cut = min(_start_of_partial(text, stop) for stop in self._stops)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The end of the text: what was held back and became no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int, str] | None:
        found = [
            (start + len(stop), len(stop), stop) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        return min(found, key=lambda match: (match[0], -match[1]), default=None)


def _start_of_partial(text: str, stop: str) -> int:
    """Where the longest end of ``text`` that may become ``stop`` starts, or the end of ``text``."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
