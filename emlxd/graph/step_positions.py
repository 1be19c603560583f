"""Where the rows of a decode step write, kept on the device from step to step."""

from __future__ import annotations

import mlx.core as mx


class StepPositions:
    """The positions and lengths of rows as arrays, int32 [b] each.

    A row's next position is one that the step before has computed. An array that the host makes anew for
    every step costs more: a GPU would wait while it is copied.
    """

    def __init__(self) -> None:
        self._expected: list[int] = []
        self._next: mx.array | None = None
        self._lengths: list[int] = []
        self._length_array = mx.array([], dtype=mx.int32)

    def arrays(self, at: list[int], lengths: list[int]) -> tuple[mx.array, mx.array]:
        """For rows that write ``lengths`` tokens, 1 or 0, from ``at`` on."""
        if lengths != self._lengths:
            self._lengths, self._length_array = lengths, mx.array(lengths, dtype=mx.int32)
        known = self._next if at == self._expected else None
        self._next = None
        self._expected = [position + length for position, length in zip(at, lengths, strict=True)]
        return mx.array(at, dtype=mx.int32) if known is None else known, self._length_array

    def advance(self, positions: mx.array) -> None:
        """``positions`` are those of the rows after the step that took the last arrays."""
        self._next = positions
