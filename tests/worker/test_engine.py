"""The engine and its scheduler: every request gets its own answer, whatever happens around it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emlxd.core import Failed, Finished, GenerateRequest, PromptScored
from emlxd.errors import ServerFault
from tests.worker.fakes import VOCAB, FakePending
from tests.worker.harness import Harness


def rule(tokens: Sequence[int]) -> int:
    """An answer that depends on every token before it, and ends by itself now and then."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 97
    return value % 23


def answer(prompt: Sequence[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(rule(tokens))
        if tokens[-1] == 0:
            break
    return tokens[len(prompt) :]


def request(number: int, prompt: Sequence[int], max_tokens: int = 20, **changes: object) -> GenerateRequest:
    return GenerateRequest(f"r{number}", tuple(prompt), max_tokens, **changes)  # type: ignore[arg-type]


def test_one_request_gets_its_answer_and_its_counts() -> None:
    harness = Harness(rule)
    listener = harness.submit(request(1, range(1, 11)))
    harness.run()
    tokens = answer(range(1, 11), 20)
    assert listener.text.split() == [str(token) for token in tokens if token != 0]
    end = listener.end
    assert isinstance(end, Finished)
    assert end.reason == ("stop" if tokens[-1] == 0 else "length")
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (10, len(tokens))


def test_a_step_is_dispatched_while_one_runs_and_before_the_tokens_of_another_are_looked_at() -> None:
    harness = Harness(lambda tokens: 5)
    listener = harness.submit(request(1, [1, 2], max_tokens=5))
    decode, heard = harness.runner.decode, []

    def listening(positions: Sequence[int | None]) -> FakePending:
        heard.append(listener.text)
        return decode(positions)

    harness.runner.decode = listening  # type: ignore[method-assign]
    for _ in range(3):
        harness.step()
    assert heard == ["", "", ""] and listener.text == "5 5 "  # the prompt's token, and the first step's
    harness.step()
    assert heard[3:] == ["5 5 "] and listener.text == "5 5 5 "


def test_no_step_is_dispatched_past_max_tokens() -> None:
    harness = Harness(lambda tokens: 5)
    harness.submit(request(1, [1, 2], max_tokens=1))
    harness.run()
    assert harness.runner.batches == []


def test_a_stop_string_ends_the_answer() -> None:
    harness = Harness(lambda tokens: len(tokens))
    listener = harness.submit(request(1, [1, 2, 3], stop=("6",)))
    harness.run()
    assert listener.text == "3 4 5 "
    assert isinstance(listener.end, Finished)
    assert (listener.end.reason, listener.end.stop_sequence) == ("stop", "6")


def test_a_long_prompt_is_cut_into_chunks_and_does_not_stop_others() -> None:
    harness = Harness(lambda tokens: 5, chunk=32)
    first = harness.submit(request(1, [1], max_tokens=50))
    harness.step()
    harness.step()
    second = harness.submit(request(2, [2] * 200, max_tokens=2))
    texts = []
    while not second.events:
        harness.step()
        texts.append(first.text)
    assert max(harness.runner.prefills) <= 32
    assert all(earlier != later for earlier, later in pairwise(texts))


def test_short_prompts_are_prefilled_together() -> None:
    harness = Harness(rule, chunk=64)
    for number in range(4):
        harness.submit(request(number, range(1, 15 + number)))
    harness.step()
    assert len(harness.runner.prefills) == 1
    assert all(sequence.dispatched for sequence in harness.scheduler.running[:3])


@pytest.mark.parametrize(("short", "together"), [(4, True), (3, False)])
def test_prompts_are_prefilled_together_if_little_of_it_is_padding(short: int, together: bool) -> None:
    """Half as much as is real, at most: of 10 and 4 tokens 14 are real and 6 padding."""
    harness = Harness(rule, chunk=64)
    for number, length in enumerate((10, short)):
        harness.submit(request(number, range(1, 1 + length)))
    harness.step()
    assert harness.runner.prefills == ([20] if together else [10])


def test_first_come_first_served() -> None:
    harness = Harness(rule, slots=2)
    listeners = [harness.submit(request(number, [number + 1] * 5)) for number in range(6)]
    seen: list[int] = []
    while not harness.engine.idle:
        harness.step()
        seen += [n for n, listener in enumerate(listeners) if listener.events and n not in seen]
    assert seen == sorted(seen)


def test_many_answers_to_one_prompt_do_not_hold_up_others() -> None:
    harness = Harness(lambda tokens: 5, slots=2)
    many = harness.submit(request(1, [1, 2], max_tokens=5, n=64))
    harness.step()
    others = [harness.submit(request(number, [3, number], max_tokens=5)) for number in (2, 3)]
    while not all(other.end for other in others):
        harness.step()
    assert many.ends <= 4
    harness.run()
    assert many.ends == 64


def test_others_do_not_hold_up_many_answers_to_one_prompt() -> None:
    harness = Harness(lambda tokens: 5, slots=2)
    many = harness.submit(request(0, [1, 2], max_tokens=5, n=4))
    number = 0
    while many.ends < 4:
        if harness.engine.waiting < 8:  # there are always others who wait
            number += 1
            harness.submit(request(number, [3, number], max_tokens=5))
        harness.step()
        assert number < 100


def test_answers_to_one_prompt_share_its_prefill() -> None:
    harness = Harness(rule, slots=3, chunk=32)
    listener = harness.submit(request(1, range(1, 81), n=5))
    harness.run()
    tokens = [str(token) for token in answer(range(1, 81), 20) if token != 0]
    assert [listener.text_of(index).split() for index in range(5)] == [tokens] * 5
    assert sum(isinstance(event, Finished) for event in listener.events) == 5
    assert harness.runner.copied[:2] == [79, 79]


def test_answers_to_one_prompt_look_it_up_once_each() -> None:
    """Also where nothing is found, and other prompts are prefilled before theirs."""
    harness = Harness(rule, slots=2, chunk=8)
    listener = harness.submit(request(1, range(1, 401), max_tokens=1, n=6))
    harness.run()
    assert [isinstance(event, Finished) for event in listener.events].count(True) == 6
    assert harness.engine.prefixes.query_tokens <= 6 * 400


def test_a_prompt_that_is_known_is_not_computed_again() -> None:
    harness = Harness(rule, chunk=1024, blocks=8)
    prompt = [1 + number % 90 for number in range(300)]
    harness.submit(request(1, prompt))
    harness.run()
    harness.runner.prefills.clear()
    listener = harness.submit(request(2, [*prompt, 5]))
    harness.run()
    assert harness.runner.prefills == [301 - 256]
    assert isinstance(listener.end, Finished)
    assert listener.end.usage.cached_tokens == 256
    assert listener.text.split() == [str(token) for token in answer([*prompt, 5], 20) if token != 0]


def test_a_state_is_taken_up_at_the_end_of_a_prompt_and_where_prompts_have_parted() -> None:
    harness = Harness(rule, chunk=1024, blocks=32, recurrent=True, checkpoints=8)
    common, tails = [1 + number % 90 for number in range(200)], [[7] * 150, [8] * 150, [9] * 150]
    cached, computed = [], []
    for number, tail in enumerate([*tails, [*tails[2], 5]]):
        harness.runner.prefills.clear()
        listener = harness.submit(request(number, [*common, *tail]))
        harness.run()
        cached.append(listener.end.usage.cached_tokens)  # type: ignore[union-attr]
        computed.append(harness.runner.prefills.copy())
    # The second learns where the first had other text, the third gains by it, the fourth goes on from there.
    assert cached == [0, 0, 192, 320]
    assert computed == [[320, 30], [192, 128, 30], [128, 30], [31]]


def test_the_next_turn_takes_up_the_state_at_the_end_of_an_answer_s_last_block() -> None:
    harness = Harness(lambda tokens: 5, chunk=1024, blocks=32, recurrent=True, checkpoints=8)
    prompt = [1 + number % 90 for number in range(100)]
    harness.submit(request(1, prompt, max_tokens=120))
    harness.run()
    listener = harness.submit(request(2, [*prompt, *[5] * 120, 7]))
    harness.run()
    assert listener.end.usage.cached_tokens == 192  # type: ignore[union-attr]


def test_a_state_that_is_left_along_the_way_stays_as_it_was() -> None:
    """Where layers have rings beside the states, an answer's blocks are left as they are completed."""
    harness = Harness(lambda tokens: 5, chunk=1024, blocks=32, recurrent=True, checkpoints=8)
    harness.runner.ring = 128
    prompt = [1 + number % 90 for number in range(100)]
    harness.submit(request(1, prompt, max_tokens=200))
    harness.run()
    for length in (128, 192, 256):
        listener = harness.submit(request(length, [*prompt, *[5] * (length - 100), 7], max_tokens=2))
        harness.run()
        assert listener.end.usage.cached_tokens == length  # type: ignore[union-attr]


def test_answers_to_one_prompt_share_its_state_before_the_last_token() -> None:
    harness = Harness(rule, slots=3, chunk=32, recurrent=True)
    listener = harness.submit(request(1, range(1, 81), n=5))
    harness.run()
    tokens = [str(token) for token in answer(range(1, 81), 20) if token != 0]
    assert [listener.text_of(index).split() for index in range(5)] == [tokens] * 5
    assert harness.runner.copied == [79, 79]


def test_a_prompt_is_scored_and_nothing_generated() -> None:
    harness = Harness(rule, chunk=16, blocks=8)
    prompt = list(range(1, 71))
    for number in range(2):  # the second time the prompt is in the cache, and is computed all the same
        listener = harness.submit(request(number, prompt, max_tokens=0, prompt_logprobs=1))
        harness.run()
        scored, end = listener.events
        assert isinstance(scored, PromptScored) and isinstance(end, Finished)
        assert [entry and entry.token for entry in scored.logprobs] == [None, *prompt[1:]]
        assert scored.logprobs[5] and scored.logprobs[5].top == ((0, -0.5),)
        assert end.usage.completion_tokens == 0


@pytest.mark.parametrize("steps", range(1, 9))
def test_a_prompt_is_scored_once_also_if_its_answer_is_computed_again(steps: int) -> None:
    harness = Harness(lambda tokens: rule(tokens) or 5, chunk=16)
    prompt = list(range(1, 40))
    listener = harness.submit(request(1, prompt, prompt_logprobs=1))
    harness.submit(request(2, [1, 2]))
    for _ in range(steps):
        harness.step()
    harness.engine.recover(ServerFault("full"), shed=True)
    harness.run()
    (scored,) = (event for event in listener.events if isinstance(event, PromptScored))
    assert [entry and entry.token for entry in scored.logprobs] == [None, *prompt[1:]]
    assert len(listener.text.split()) == 20


def test_text_that_repeats_itself_takes_fewer_steps() -> None:
    words = [5, 6, 7, 8, 9, 10, 11]
    harness = Harness(lambda tokens: words[len(tokens) % 7], max_draft=4)
    listener = harness.submit(request(1, [1], max_tokens=70))
    steps = 0
    while not harness.engine.idle:
        harness.step()
        steps += 1
    assert [int(word) for word in listener.text.split()] == [words[(1 + n) % 7] for n in range(70)]
    assert harness.runner.verified and steps < 40


class OnlyOdd:
    """A grammar: five odd numbers."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @property
    def finished(self) -> bool:
        return len(self.seen) == 5

    def mask(self) -> bytes:
        return b"\xaa" * (VOCAB // 8)

    def accept(self, token: int) -> None:
        assert token % 2
        self.seen.append(token)


def test_a_grammar_holds_its_own_answer_and_no_other() -> None:
    harness = Harness(lambda tokens: rule(tokens) or 4)
    free = harness.submit(request(1, [3] * 40))
    harness.step()
    held = harness.submit(request(2, [3] * 40), OnlyOdd())
    harness.run()
    tokens = [int(word) for word in held.text.split()]
    assert len(tokens) == 5 and all(token % 2 for token in tokens)
    expected = [3] * 40
    while len(expected) < 60:
        expected.append(rule(expected) or 4)
    assert free.text.split() == [str(token) for token in expected[40:]]


@pytest.mark.parametrize("steps", range(8))
def test_a_cancelled_request_frees_its_slot_at_once(steps: int) -> None:
    harness = Harness(lambda tokens: 5, slots=1, chunk=16)
    listener = harness.submit(request(1, [1] * 60, max_tokens=50))
    waiting = harness.submit(request(2, [2] * 4, max_tokens=2))
    for _ in range(steps):
        harness.step()
    harness.engine.cancel("r1")
    count = len(listener.events)
    harness.step()
    assert [s.request.id for s in harness.scheduler.running] == ["r2"]
    harness.run()
    assert len(listener.events) == count
    assert isinstance(waiting.end, Finished)


class Breaking(OnlyOdd):
    """A grammar that fails on its third mask or token."""

    def __init__(self, *, on_mask: bool) -> None:
        super().__init__()
        self._on_mask = on_mask

    def mask(self) -> bytes:
        if self._on_mask and len(self.seen) == 3:
            raise ServerFault("no mask")
        return super().mask()

    def accept(self, token: int) -> None:
        super().accept(token)
        if not self._on_mask and len(self.seen) == 3:
            raise ServerFault("no token")


@pytest.mark.parametrize("on_mask", [True, False])
def test_a_grammar_that_breaks_ends_its_own_answer_and_moves_nobody_within_a_step(on_mask: bool) -> None:
    harness = Harness(rule_without_end)
    broken = harness.submit(request(1, [2] * 10), Breaking(on_mask=on_mask))
    others = [harness.submit(request(number, [3] * (9 + number))) for number in (2, 3)]
    held = harness.submit(request(4, [4] * 12), OnlyOdd())
    harness.run()
    assert isinstance(broken.end, Failed)
    assert len(held.text.split()) == 5
    for number, listener in zip((2, 3), others, strict=True):
        tokens = [3] * (9 + number)
        while len(tokens) < 29 + number:
            tokens.append(rule_without_end(tokens))
        assert listener.text.split() == [str(token) for token in tokens[9 + number :]]


def rule_without_end(tokens: Sequence[int]) -> int:
    return rule(tokens) or 4


def test_a_request_that_takes_too_long_is_ended_wherever_it_is() -> None:
    harness = Harness(lambda tokens: 5, slots=1, timeout=10)
    running, waiting = (harness.submit(request(number, [1, 2], max_tokens=4000)) for number in range(2))
    for _ in range(8):
        harness.step()
    quick = harness.submit(request(2, [1, 2], max_tokens=3))
    harness.run()
    for listener in (running, waiting):
        assert isinstance(listener.end, Failed) and listener.end.error.status == 408
    assert isinstance(quick.end, Finished)


class Everything:
    """A grammar that allows all tokens, so that only the way of computing differs."""

    finished = False

    def mask(self) -> bytes:
        return b"\xff" * (VOCAB // 8)

    def accept(self, token: int) -> None:
        pass


COMMON = [1 + number % 90 for number in range(160)]
prompts = st.builds(
    lambda shared, own: COMMON[:shared] + own,
    st.sampled_from([0, 0, 55, 64, 120, 128, 160]),
    st.lists(st.integers(1, 9), min_size=1, max_size=150),
)
arrivals = st.lists(
    st.tuples(
        st.integers(0, 30),  # step of arrival
        prompts,
        st.sampled_from([1, 1, 1, 2, 3]),  # answers
        st.integers(1, 30),  # max_tokens
        st.one_of(st.none(), st.integers(0, 40)),  # cancelled so many steps later
        st.sampled_from([False, False, True]),  # held by a grammar, of everything
    ),
    max_size=25,
)


@pytest.mark.parametrize("guarded", [True, False])
def test_a_state_is_copied_for_nobody_who_has_ended_meanwhile(guarded: bool) -> None:
    """The step that follows the last token ends a block, or the step after it."""
    for end in (62, 63):
        harness = Harness(
            lambda tokens, end=end: 0 if len(tokens) == end else 5, blocks=4, recurrent=True, checkpoints=4
        )
        harness.submit(request(1, range(1, 63)), Everything() if guarded else None)
        harness.run()
        assert not harness.engine.prefixes.checkpoints.lent


@settings(max_examples=200, deadline=None)
@given(
    arrivals=arrivals,
    slots=st.integers(1, 6),
    chunk=st.sampled_from([16, 33, 64]),
    blocks=st.sampled_from([0, 2, 16]),
    max_draft=st.sampled_from([0, 3]),
    checkpoints=st.sampled_from([None, 0, 1, 4]),
)
def test_any_traffic_gives_everyone_their_own_answer(
    arrivals: list[tuple[int, list[int], int, int, int | None, bool]],
    slots: int,
    chunk: int,
    blocks: int,
    max_draft: int,
    checkpoints: int | None,
) -> None:
    """``checkpoints`` None is a model without a recurrent state."""
    harness = Harness(
        rule,
        slots=slots,
        chunk=chunk,
        blocks=blocks,
        max_draft=max_draft,
        recurrent=checkpoints is not None,
        checkpoints=checkpoints or 0,
    )
    listeners = {}
    cancelled = set()
    step = 0
    while step <= 72 or not harness.engine.idle:
        for number, (at, prompt, n, max_tokens, cancel_after, guarded) in enumerate(arrivals):
            if at == step:
                asked = request(number, prompt, max_tokens, n=n)
                listeners[number] = harness.submit(asked, Everything() if guarded else None)
            if cancel_after is not None and at + cancel_after == step and listeners[number].end is None:
                harness.engine.cancel(f"r{number}")
                cancelled.add(number)
        harness.step()
        step += 1
    for number, (_, prompt, n, max_tokens, _, _) in enumerate(arrivals):
        tokens = [str(token) for token in answer(prompt, max_tokens) if token != 0]
        ends = sum(isinstance(event, Finished) for event in listeners[number].events)
        assert number in cancelled or ends == n
        for index in range(n):
            got = listeners[number].text_of(index).split()
            assert got == tokens if number not in cancelled else got == tokens[: len(got)]
    assert not harness.scheduler.running and not harness.scheduler.waiting
    assert not harness.engine.prefixes.checkpoints.lent
