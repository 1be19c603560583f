"""How events leave a worker thread: gathered during a step, one wake of the event loop per step.

What a client does not read stays here, so it is bounded. Text that waits is joined, and a generation
whose unread events weigh more than ``MAX_UNREAD`` is cut off with an error.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from math import inf
from typing import Final

from emlxd.core import Event, Failed, Finished, GenerateRequest, PromptScored, TextPiece, ToolCallPiece, Usage
from emlxd.errors import EmlxdError, RequestError

MAX_UNREAD: Final = 512 * 1024  # bytes, roughly
JOIN_ABOVE: Final = 256  # events; a reader that keeps up never has so many
_EVENT_WEIGHT: Final = 100  # bytes that an event takes besides its text
_SCORE_WEIGHT: Final = 100  # bytes that a token and its log-probability take


class Generation:
    """One running request as the event loop sees it: an async iterator of events.

    It ends with a ``Finished`` for each answer, or with ``Failed``. ``cancel`` may be called at any time,
    also more than once and after the end; the worker frees the slots within one step.
    """

    def __init__(
        self, request: GenerateRequest, cancel: Callable[[str], None], spent: Callable[[], Usage] = Usage
    ) -> None:
        """``spent`` says what the request has taken so far."""
        self.request = request
        self._cancel = cancel
        self._spent = spent
        self._events: deque[Event] = deque()
        self._weight = 0
        self._arrived = asyncio.Event()
        self._unfinished = request.n
        self._ends_to_come = request.n
        self._complete = asyncio.Event()
        self._closed = False

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if not self._unfinished:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        self._weight -= _weight(event)
        if isinstance(event, Finished):
            self._unfinished -= 1
        elif isinstance(event, Failed):
            self._unfinished = 0
        return event

    async def complete(self, seconds: float) -> None:
        """Waits until the last event is there, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._complete.wait()

    @property
    def ready(self) -> bool:
        """Whether the next event is there already, and no failure."""
        return bool(self._events) and not isinstance(self._events[0], Failed)

    @property
    def unread(self) -> int:
        """What waits to be read, in bytes, roughly."""
        return self._weight

    @property
    def spent(self) -> Usage:
        """What was read and written for it so far, whether or not anybody gets it; a step old at most."""
        return self._spent()

    def cancel(self) -> None:
        """Stop generating. Nothing more needs to be read."""
        if self._unfinished:
            self._cancel(self.request.id)

    def fail(self, error: EmlxdError) -> None:
        """End it from the reader's side: its last unread event is ``Failed``. Works without the worker."""
        if self._unfinished and not self._closed:
            self.cancel()
            self.deliver([Failed(error)])
            self._closed = True

    def deliver(self, events: list[Event]) -> None:
        """Adds to what waits to be read. Called on the event loop."""
        if self._closed:
            return
        self._events.extend(events)
        self._weight += sum(map(_weight, events))
        self._ends_to_come -= sum(isinstance(event, Finished) for event in events)
        if self._ends_to_come == 0 or isinstance(events[-1], Failed):
            self._complete.set()
        if len(self._events) > JOIN_ABOVE + 2 * self.request.n:
            self._events = _joined(self._events)
            self._weight = sum(map(_weight, self._events))
        if self._weight > MAX_UNREAD and not isinstance(self._events[-1], Failed):
            self.fail(_too_slow())
        self._arrived.set()


def _weight(event: Event) -> int:
    match event:
        case TextPiece():
            scores = sum(_SCORE_WEIGHT * (1 + len(entry.top)) for entry in event.logprobs)
            return _EVENT_WEIGHT + len(event.text) + scores
        case ToolCallPiece():
            return _EVENT_WEIGHT + len(event.arguments)
        case _:
            return _EVENT_WEIGHT


def _joined(events: Iterable[Event]) -> deque[Event]:
    """The same events, those of each answer in their order, with neighbouring text in one piece."""
    by_answer = sorted(events, key=_answer)
    joined: deque[Event] = deque()
    for _, group in groupby(by_answer, key=_without_text):
        same = list(group)
        joined.append(_join(same) if isinstance(same[0], TextPiece) else same[0])
    return joined


def _answer(event: Event) -> float:
    """Where an event sorts: by its answer. The prompt's scores come before all, a failure after all."""
    match event:
        case PromptScored():
            return -1
        case Failed():
            return inf
        case _:
            return event.index


def _without_text(event: Event) -> Event | int:
    """A key that is equal for neighbouring pieces of text that may be joined, and for nothing else."""
    return replace(event, text="", logprobs=()) if isinstance(event, TextPiece) else id(event)


def _join(pieces: Sequence[Event]) -> TextPiece:
    texts = [piece for piece in pieces if isinstance(piece, TextPiece)]
    return replace(
        texts[0],
        text="".join(piece.text for piece in texts),
        logprobs=tuple(entry for piece in texts for entry in piece.logprobs),
    )


def _too_slow() -> RequestError:
    return RequestError(
        f"The answer was cut off: more than {MAX_UNREAD // 1024} KiB of it were waiting to be read.",
        code="client_too_slow",
    )


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
            generation.deliver(events)
