"""The end of the server as requests see it: nothing new starts, what runs may finish, then is cut off."""

from __future__ import annotations

from emlxd.errors import Unavailable
from emlxd.worker.mailbox import Generation


class Drain:
    """Knows every generation that a client is waiting for."""

    def __init__(self) -> None:
        self._running: set[Generation] = set()
        self._started = False

    @property
    def started(self) -> bool:
        return self._started

    def start(self) -> None:
        """Refuse new generations from now on."""
        self._started = True

    def check(self) -> None:
        """Raises Unavailable once the drain has started."""
        if self._started:
            raise Unavailable("The server is shutting down.")

    def cut(self) -> int:
        """End what still runs with an error. Returns how many that were."""
        self.start()
        for generation in self._running:
            generation.fail(Unavailable("The server is shutting down and cut this answer off."))
        return len(self._running)

    def add(self, generation: Generation) -> None:
        self._running.add(generation)

    def discard(self, generation: Generation) -> None:
        self._running.discard(generation)
