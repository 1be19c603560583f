"""How events leave a worker thread: gathered during a step, one wake of the event loop per step."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from emlxd.core import Event, Failed, Finished, GenerateRequest
from emlxd.errors import EmlxdError


class Generation:
    """One running request as the event loop sees it: an async iterator of events.

    The last event is ``Finished`` or ``Failed``. ``cancel`` may be called at any time, also more
    than once and after the end; the worker frees the slot within one step.
    """

    def __init__(self, request: GenerateRequest, cancel: Callable[[str], None]) -> None:
        self.request = request
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._ended = False

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._ended:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        self._ended = isinstance(event, Finished | Failed)
        return event

    def cancel(self) -> None:
        """Stop generating. Nothing more needs to be read."""
        if not self._ended:
            self._cancel(self.request.id)

    def fail(self, error: EmlxdError) -> None:
        """End it from the reader's side: its next unread event is ``Failed``. Works without the worker."""
        self.cancel()
        self._events.append(Failed(error))
        self._arrived.set()

    def _deliver(self, events: list[Event]) -> None:
        self._events.extend(events)
        self._arrived.set()


class Mailbox:
    """Collects events on the worker thread and hands each step's worth to the loop at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: dict[Generation, list[Event]] = {}

    def put(self, generation: Generation, event: Event) -> None:
        self._pending.setdefault(generation, []).append(event)

    def flush(self) -> None:
        """Deliver what was put since the last flush. A closed loop means nobody listens any more."""
        if not self._pending:
            return
        batch, self._pending = self._pending, {}
        try:
            self._loop.call_soon_threadsafe(self._deliver, batch)
        except RuntimeError:
            return

    @staticmethod
    def _deliver(batch: dict[Generation, list[Event]]) -> None:
        for generation, events in batch.items():
            generation._deliver(events)
