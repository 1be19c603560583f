"""How much of a prompt may be prefilled while others wait for their next token."""

from __future__ import annotations

from typing import Final

MIN_TOKENS: Final = 16
KEPT: Final = 0.6  # of what was observed before, at each new observation
GROWTH: Final = 2  # times the last chunk, at most


class PrefillPacer:
    """Learns this device's prefill speed and turns a time slice into a number of tokens."""

    def __init__(self, slice_seconds: float) -> None:
        self._slice = slice_seconds
        self._tokens = 0.0
        self._seconds = 0.0
        self._last = 0

    def observe(self, tokens: int, seconds: float) -> None:
        """A chunk of ``tokens`` took ``seconds``; recent chunks count most, since long windows are slower.

        Both are summed up: where a chunk ends and the next begins is not seen exactly.
        """
        if tokens == 0:
            return
        self._tokens = KEPT * self._tokens + tokens
        self._seconds = KEPT * self._seconds + max(seconds, 0.0)
        self._last = tokens

    @property
    def tokens(self) -> int:
        """What fits a slice. Before the first observation, and after a short prompt, a cautious few."""
        if not self._seconds:
            return MIN_TOKENS
        fitting = int(self._tokens / self._seconds * self._slice)
        return max(min(fitting, GROWTH * self._last), MIN_TOKENS)
