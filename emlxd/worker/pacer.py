"""How much of a prompt may be prefilled while others wait for their next token."""

from __future__ import annotations

MIN_TOKENS = 16


class PrefillPacer:
    """Learns this device's prefill speed and turns a time slice into a number of tokens."""

    def __init__(self, slice_seconds: float) -> None:
        self._slice = slice_seconds
        self._speed = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A chunk of ``tokens`` took ``seconds``; recent chunks count most, since long windows are slower."""
        if tokens == 0 or seconds <= 0:
            return
        speed = tokens / seconds
        self._speed = speed if self._speed == 0 else 0.5 * self._speed + 0.5 * speed

    @property
    def tokens(self) -> int:
        """What fits a slice. Before the first observation, a cautious few."""
        return max(int(self._speed * self._slice), MIN_TOKENS)
