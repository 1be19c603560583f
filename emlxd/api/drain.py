"""What runs, and the end of the server as requests see it: nothing new starts, what runs may finish."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from emlxd.errors import EmlxdError, RequestError, RequestNotFound, Unavailable
from emlxd.worker.mailbox import Generation

_ID_DIGITS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """A generation that a client waits for. Its ids are those of the ``Exchange``; several may share them."""

    generation_id: str
    request_id: str
    model: str
    route: str
    generation: Generation
    started: float = field(default_factory=time.monotonic)


class Drain:
    """Knows every generation that a client is waiting for."""

    def __init__(self) -> None:
        self._running: dict[Running, None] = {}
        self._started = False

    @property
    def started(self) -> bool:
        return self._started

    @property
    def running(self) -> Sequence[Running]:
        """The oldest first."""
        return list(self._running)

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
        return _fail(self.running, Unavailable("The server is shutting down and cut this answer off."))

    def abort(self, id: str) -> None:
        """End what the request ``id`` runs with an error. Raises RequestNotFound.

        The id may be that of the HTTP request, the client's own too, or that of its answer, which ends as
        the generation's does.
        """
        digits = id[-_ID_DIGITS:]
        known = len(digits) == _ID_DIGITS
        own = [
            one
            for one in self._running
            if one.request_id == id or (known and one.generation_id.endswith(digits))
        ]
        if not own:
            raise RequestNotFound(id)
        _fail(own, RequestError("The request was aborted by the server's operator.", code="request_aborted"))

    def add(self, running: Running) -> None:
        self._running[running] = None

    def discard(self, running: Running) -> None:
        self._running.pop(running, None)


def _fail(running: Sequence[Running], error: EmlxdError) -> int:
    for one in running:
        one.generation.fail(error)
    return len(running)
