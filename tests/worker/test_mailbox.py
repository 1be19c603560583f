"""What waits to be read: in order, joined when there is much of it, and never without bound."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from emlxd.core import (
    Event,
    Failed,
    Finished,
    GenerateRequest,
    PromptScored,
    TextPiece,
    Timing,
    TokenLogprob,
    Usage,
)
from emlxd.errors import ServerFault
from emlxd.worker.mailbox import JOIN_ABOVE, MAX_UNREAD, Generation


class Listener:
    """A generation and the ids that were cancelled through it."""

    def __init__(self, **request: Any) -> None:
        self.cancelled: list[str] = []
        self.generation = Generation(GenerateRequest("r", (1,), 9, **request), self.cancelled.append)

    def say(self, *events: Event) -> None:
        self.generation.deliver(list(events))

    async def rest(self) -> list[Event]:
        return [event async for event in self.generation]


def finished(index: int = 0) -> Finished:
    return Finished("stop", Usage(), Timing(), index=index)


async def test_a_reader_that_keeps_up_gets_every_piece() -> None:
    listener = Listener()
    listener.say(TextPiece("a"), TextPiece("b"))
    listener.say(finished())
    assert await listener.rest() == [TextPiece("a"), TextPiece("b"), finished()]
    listener.generation.cancel()
    assert listener.cancelled == []


async def test_it_ends_with_the_last_answer() -> None:
    listener = Listener(n=2)
    listener.say(TextPiece("a", 1), finished(1), TextPiece("b", 0), finished(0))
    assert len(await listener.rest()) == 4


async def test_a_failure_is_the_last_event() -> None:
    listener = Listener(n=2)
    listener.say(TextPiece("a"), finished(1))
    listener.generation.fail(ServerFault("broken"))
    listener.say(TextPiece("late"))
    *before, last = await listener.rest()
    assert before == [TextPiece("a"), finished(1)]
    assert isinstance(last, Failed) and last.error.message == "broken"
    assert listener.cancelled == ["r"]


@settings(max_examples=20, deadline=None)
@given(random=st.randoms(use_true_random=False), count=st.integers(JOIN_ABOVE, 3 * JOIN_ABOVE))
async def test_joined_text_is_the_same_text(random: Random, count: int) -> None:
    said = [(random.randrange(3), random.choice(["", "a", "é😀"])) for _ in range(count)]
    listener = Listener(n=3)
    entries = [TokenLogprob(place, -1.0) for place in range(len(said))]
    listener.say(PromptScored((None,)))
    for (index, text), entry in zip(said, entries, strict=True):
        listener.say(TextPiece(text, index, (entry,)))
    listener.say(*map(finished, range(3)))
    heard = await listener.rest()
    assert len(heard) <= JOIN_ABOVE + 10
    assert heard[0] == PromptScored((None,))
    for index in range(3):
        mine = [
            event for event in heard if not isinstance(event, PromptScored | Failed) and event.index == index
        ]
        *pieces, end = mine
        assert isinstance(end, Finished)
        texts = [piece for piece in pieces if isinstance(piece, TextPiece)]
        assert "".join(piece.text for piece in texts) == "".join(text for at, text in said if at == index)
        assert [entry for piece in texts for entry in piece.logprobs] == [
            entry for (at, _), entry in zip(said, entries, strict=True) if at == index
        ]


async def test_what_is_not_read_is_cut_off() -> None:
    """Two hundred readers that do not read cost at most 200 x MAX_UNREAD, whatever is said."""
    listeners = [Listener() for _ in range(200)]
    words = TextPiece(" word" * 1000)
    for listener in listeners:
        while not listener.cancelled:
            listener.say(words)
        listener.say(words, words)
        assert listener.generation.unread < MAX_UNREAD + 5000 + 300
    *_, last = await listeners[0].rest()
    assert isinstance(last, Failed) and last.error.code == "client_too_slow"
    assert "512 KiB" in last.error.message


async def test_logprobs_weigh_too() -> None:
    listener = Listener()
    entry = TokenLogprob(1, -1.0, ((1, -1.0),) * 20)
    count = 0
    while not listener.cancelled:
        listener.say(TextPiece("a", 0, (entry,)))
        count += 1
    assert count < MAX_UNREAD / 2000


async def test_reading_makes_room() -> None:
    listener = Listener()
    for _ in range(3 * MAX_UNREAD // 1000):
        listener.say(TextPiece("x" * 1000))
        await anext(listener.generation)
    assert listener.cancelled == [] and listener.generation.unread == 0
