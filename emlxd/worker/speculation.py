"""Drafts from the text itself: what followed the last time that these tokens stood in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

NGRAM: Final = 3
FIRST_PAUSE: Final = 4
LONGEST_PAUSE: Final = 128


class PromptLookup:
    """Proposes the next tokens of one sequence, and learns whether that is worth the trouble.

    A step that checks a draft cannot overlap with the host's work and computes more tokens. So after one that
    gained nothing there is a pause of 4 steps, after the next such one of 8, then 16 ... up to 128.
    """

    def __init__(self, max_draft: int) -> None:
        self._max_draft = max_draft
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0
        self._pause = FIRST_PAUSE
        self._resting = 0

    def resting(self) -> bool:
        """Whether this step is one of a pause, which gets shorter by it. To be asked once a step."""
        if self._resting:
            self._resting -= 1
            return True
        return False

    def propose(self, tokens: Sequence[int]) -> list[int]:
        """A draft of what follows ``tokens``, which only ever grow; empty if the last three are new."""
        for end in range(max(self._indexed, NGRAM), len(tokens)):
            self._ends[tuple(tokens[end - NGRAM : end])] = end
        self._indexed = max(self._indexed, len(tokens))
        found = self._ends.get(tuple(tokens[-NGRAM:]))
        return [] if found is None else list(tokens[found : found + self._max_draft])

    def learn(self, gained: int) -> None:
        """Takes note of how many drafted tokens were right in a step that was tried."""
        if gained:
            self._pause, self._resting = FIRST_PAUSE, 0
        else:
            self._resting = self._pause
            self._pause = min(self._pause * 2, LONGEST_PAUSE)
