"""Answers that are held to a form, beside others that are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emlxd.core import Failed, Finished, GenerateRequest
from emlxd.errors import RequestError
from emlxd.text.grammar import only
from tests.worker.fakes import VOCAB
from tests.worker.harness import Harness


class Script:
    """Allows one token after the other; where it has a 'None' it cannot go on."""

    def __init__(self, *tokens: int | None) -> None:
        self._left = list(tokens)

    @property
    def finished(self) -> bool:
        return not self._left

    def mask(self) -> bytes:
        if self._left[0] is None:
            raise RequestError("too complex")
        return only(self._left[0], VOCAB // 8)

    def accept(self, token: int) -> None:
        assert token == self._left.pop(0), "the token that the mask allows"


def request(id: str, max_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(id, (1, 2, 3), max_tokens)


def test_each_token_is_sampled_under_its_mask_and_the_end_is_the_grammars() -> None:
    harness = Harness(lambda tokens: 9)
    listener = harness.submit(request("a"), Script(5, 6, 7))
    harness.run()
    assert listener.text == "5 6 7 "
    assert isinstance(listener.end, Finished) and listener.end.reason == "stop"


def test_neighbours_are_not_held() -> None:
    harness = Harness(lambda tokens: len(tokens))
    held = harness.submit(request("a"), Script(5, 6, 7))
    free = harness.submit(request("b", 5))
    harness.run()
    assert (held.text, free.text) == ("5 6 7 ", "3 4 5 6 7 ")


@pytest.mark.parametrize(("n", "script"), [(1, [None]), (2, [None]), (1, [5, None]), (1, [5, 6, None])])
def test_grammar_that_cannot_go_on_fails_its_own_request(n: int, script: list[int | None]) -> None:
    harness = Harness(lambda tokens: len(tokens), slots=6)
    before = harness.submit(request("before", 5))
    stuck = harness.submit(replace(request("a"), n=n), Script(*script))
    after = harness.submit(request("after", 5))
    harness.run()
    assert isinstance(stuck.end, Failed) and stuck.end.error.status == 400
    assert before.text == after.text == "3 4 5 6 7 "
    assert not harness.scheduler.running


def test_an_answer_that_cannot_be_read_fails_its_own_request() -> None:
    class Deep(Script):
        def accept(self, token: int) -> None:
            raise RecursionError

    harness = Harness(lambda tokens: len(tokens))
    broken = harness.submit(request("a"), Deep(5, 6))
    free = harness.submit(request("b", 5))
    harness.run()
    assert isinstance(broken.end, Failed) and broken.end.error.status == 500
    assert free.text == "3 4 5 6 7 "
