"""What becomes of everyone when a step fails half-way."""

from __future__ import annotations

from typing import NoReturn

import pytest

from emlxd.core import Failed, Finished
from emlxd.errors import ServerFault
from tests.worker.harness import Harness
from tests.worker.test_engine import answer, request, rule


def test_a_failed_step_fails_who_ran_and_serves_who_waits() -> None:
    harness = Harness(rule, slots=1)
    listener, waiting = (harness.submit(request(number, [1, 2, 3])) for number in range(2))
    harness.step()
    harness.runner.fail_next = RuntimeError("device lost")
    with pytest.raises(RuntimeError):
        harness.step()
    harness.engine.recover(ServerFault("broken"), shed=False)
    harness.run()
    assert isinstance(listener.end, Failed)
    assert isinstance(waiting.end, Finished)
    assert waiting.text.split() == [str(token) for token in answer([1, 2, 3], 20) if token != 0]


@pytest.mark.parametrize("steps", range(1, 6))
def test_out_of_memory_sheds_the_newest_and_computes_the_others_again(steps: int) -> None:
    harness = Harness(lambda tokens: rule(tokens) or 5, blocks=8)
    older, newest = (harness.submit(request(number, range(1, 80 + number))) for number in range(2))
    for _ in range(steps):
        harness.step()
    harness.engine.recover(ServerFault("full"), shed=True)
    harness.run()
    assert isinstance(newest.end, Failed)
    expected = list(range(1, 80))
    while len(expected) < 99:
        expected.append(rule(expected) or 5)
    assert older.text.split() == [str(token) for token in expected[79:]]


@pytest.mark.parametrize("shed", [True, False])
def test_what_has_ended_in_the_step_that_fails_is_no_longer_there_to_fail(shed: bool) -> None:
    """A device's error comes when a step is read, after another step that was read before it."""
    harness = Harness(lambda tokens: rule(tokens) or 5)
    older, short = harness.submit(request(0, [1, 2, 3])), harness.submit(request(1, [1, 2], max_tokens=1))
    decode = harness.runner.decode

    def failing(positions: list[int | None]) -> UnreadablePending:
        decode(positions)
        return UnreadablePending()

    harness.runner.decode = failing  # type: ignore[method-assign, assignment]
    harness.step()
    with pytest.raises(MemoryError):
        harness.engine.step()
    harness.runner.decode = decode  # type: ignore[method-assign]
    harness.engine.recover(ServerFault("full"), shed=shed)
    harness.run()
    assert isinstance(short.end, Finished)
    assert isinstance(older.end, Failed)


def test_nobody_is_moved_in_what_has_failed() -> None:
    """The first of two has ended, which closes a gap as a rule, and the step that fails is never read."""
    harness = Harness(lambda tokens: rule(tokens) or 5)
    short, older = harness.submit(request(0, [1, 2], max_tokens=1)), harness.submit(request(1, [1, 2, 3]))
    decode, moves = harness.runner.decode, []

    def failing(positions: list[int | None]) -> UnreadablePending:
        decode(positions)
        return UnreadablePending()

    harness.runner.decode = failing  # type: ignore[method-assign, assignment]
    harness.runner.move = lambda *move: moves.append(move)  # type: ignore[method-assign]
    harness.step()
    with pytest.raises(MemoryError):
        harness.engine.step()
    harness.runner.decode = decode  # type: ignore[method-assign]
    harness.engine.recover(ServerFault("broken"), shed=False)
    harness.run()
    assert isinstance(short.end, Finished)
    assert isinstance(older.end, Failed)
    assert not moves


@pytest.mark.parametrize("shed", [True, False])
def test_an_answer_that_there_is_no_room_to_keep_is_over(shed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(lambda tokens: rule(tokens) or 5, blocks=8)
    short, newest = (harness.submit(request(n, range(1, 80), max_tokens=2 + 20 * n)) for n in range(2))

    def fail(_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as full, pytest.raises(MemoryError):
        full.setattr(harness.engine.prefixes, "keep_answer", fail)
        for _ in range(10):
            harness.engine.step()
    harness.engine.recover(ServerFault("full"), shed=shed)
    harness.run()
    assert isinstance(short.end, Finished)
    assert isinstance(newest.end, Failed)
    assert harness.engine.idle


class UnreadablePending:
    def read(self) -> NoReturn:
        raise MemoryError
