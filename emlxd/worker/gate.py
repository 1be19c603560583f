"""One device for several models: their threads take turns, step by step, in the order they ask."""

from __future__ import annotations

import threading
from types import TracebackType


class Gate:
    """A fair lock. ``with gate:`` is one turn."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._next = 0
        self._serving = 0

    @property
    def waiting(self) -> int:
        """How many wait for the end of the turn that is being taken."""
        return max(self._next - self._serving - 1, 0)

    @property
    def contested(self) -> bool:
        return self.waiting > 0

    def __enter__(self) -> None:
        with self._turn:
            ticket = self._next
            self._next += 1
            while ticket != self._serving:
                self._turn.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._turn:
            self._serving += 1
            self._turn.notify_all()
