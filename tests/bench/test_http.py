"""What the bench sends, and what it makes of the answers."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from emlxd.bench.http import BenchOptions, Sample, Spread, run
from emlxd.bench.prompts import make_prompt
from emlxd.bench.report import to_json, to_table
from emlxd.errors import UserError
from tests.bench.stub import FIRST_TOKEN, Stub, serving


def options(stub: Stub, **changes: Any) -> BenchOptions:
    return BenchOptions(**{"url": stub.url, "model": "m", "repeats": 2, "max_tokens": 5} | changes)


async def test_every_concurrency_is_measured_with_every_length():
    async with serving(Stub()) as stub:
        told: list[str] = []
        result = await run(options(stub, concurrency=(1, 3), prompt_tokens=(20, 40)), told.append)
    assert [(row.prompt_tokens, row.concurrency, row.requests) for row in result.rows] == [
        (20, 1, 2),
        (20, 3, 6),
        (40, 1, 2),
        (40, 3, 6),
    ]
    assert stub.most == 3
    assert "3 at once, prompts of 40 tokens" in told


async def test_times_and_rates_follow_from_the_stream():
    async with serving(Stub()) as stub:
        row = (await run(options(stub))).rows[0]
    assert row.ttft.low >= FIRST_TOKEN
    assert row.completion_tokens == 10  # the server's count, not the five chunks
    assert row.counted
    assert row.prefill_rate.high <= row.prompt_tokens / FIRST_TOKEN
    assert row.total_rate.high <= row.completion_tokens / FIRST_TOKEN
    assert row.gap is not None and row.decode_rate is not None


async def test_the_length_is_what_the_server_counts_with_its_template():
    async with serving(Stub()) as stub:  # its template has ten tokens
        row = (await run(options(stub, prompt_tokens=(50,)))).rows[0]
    assert row.prompt_tokens == 50
    assert len(stub.bodies[-1]["messages"][0]["content"].split()) == 40


async def test_warm_up_rounds_are_sent_but_not_counted():
    async with serving(Stub()) as stub:
        row = (await run(options(stub, warmup=3, repeats=1))).rows[0]
    assert row.requests == 1
    assert len(stub.bodies) == 2 + 3 + 1  # a first token, the length, and the rounds


async def test_no_prompt_is_sent_twice_even_by_another_run():
    async with serving(Stub()) as stub:
        await run(options(stub, concurrency=(2,)))
        await run(options(stub, concurrency=(2,)))
    prompts = [body["messages"][0]["content"] for body in stub.bodies]
    assert len(set(prompts)) == len(prompts)


async def test_a_shared_prefix_is_the_same_in_every_prompt():
    async with serving(Stub()) as stub:
        await run(options(stub, prompt_tokens=(40,), shared_prefix=16))
    prompts = [body["messages"][0]["content"].split() for body in stub.bodies[1:]]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 1
    assert len({tuple(prompt[16:]) for prompt in prompts}) == len(prompts)


async def test_the_request_is_what_was_asked_for():
    async with serving(Stub()) as stub:
        await run(options(stub, api_key="secret", extra={"stream_chunks": "token"}))
    body = stub.bodies[-1]
    assert (body["model"], body["max_tokens"], body["stream"], body["temperature"]) == ("m", 5, True, 0)
    assert body["stream_options"] == {"include_usage": True}
    assert body["stream_chunks"] == "token"
    assert stub.heads[-1].startswith("POST /v1/chat/completions HTTP/1.1")
    assert "authorization: bearer secret" in stub.heads[-1].lower()


async def test_completions_and_a_url_that_ends_in_v1():
    async with serving(Stub()) as stub:
        stub.url += "/v1/"
        row = (await run(options(stub, api="completions"))).rows[0]
    assert stub.heads[-1].startswith("POST /v1/completions HTTP/1.1")
    assert "prompt" in stub.bodies[-1]
    assert row.completion_tokens == 10


async def test_a_server_that_refuses_stream_options_is_measured_by_chunks():
    async with serving(Stub(usage=False)) as stub:
        result = await run(options(stub, prompt_tokens=(30,)))
    row = result.rows[0]
    assert (row.counted, row.completion_tokens, row.prompt_tokens) == (False, 5, 30)
    assert ["stream_options" in body for body in stub.bodies[:3]] == [True, False, False]


@pytest.mark.parametrize(
    ("stub", "complaint"),
    [
        (Stub(status=503), "answered 503: no"),
        (Stub(script="error"), "failed in the middle of a stream: out of memory"),
        (Stub(script="garbage"), "sent an event that is not a JSON object: b'{oops'"),
        (Stub(script="no done"), "ended the stream without [DONE]"),
        (Stub(script="break off"), "broke off: peer closed connection"),
        (Stub(script="hang up"), "closed the connection without an answer"),
        (Stub(words=0), "answered without any text"),
    ],
    ids=lambda value: f"{value.script} {value.status}" if isinstance(value, Stub) else "",
)
async def test_a_failure_is_told_and_measured_as_nothing(stub: Stub, complaint: str):
    async with serving(stub):
        with pytest.raises(UserError) as caught:
            await run(options(stub))
    assert complaint in caught.value.message


async def test_a_failure_among_many_is_told_and_ends_the_others():
    async with serving(Stub()) as stub:

        def break_rounds(what: str) -> None:
            stub.script = "error" if "at once" in what else "whole"

        with pytest.raises(UserError, match="out of memory"):
            await run(options(stub, concurrency=(3,)), break_rounds)


async def test_a_silent_server_is_given_up():
    async with serving(Stub(script="silent")) as stub:
        with pytest.raises(UserError, match=r"sent nothing for 0\.1 s"):
            await run(options(stub, timeout=0.1))


@pytest.mark.parametrize(
    ("url", "complaint"),
    [("http://127.0.0.1:9", "cannot reach http://127.0.0.1:9"), ("localhost:80", "is not a URL")],
)
async def test_a_url_that_leads_nowhere(url: str, complaint: str):
    with pytest.raises(UserError, match=complaint):
        await run(BenchOptions(url=url, model="m"))


# The numbers


def test_rates_of_one_request():
    sample = Sample(arrivals=(0.5, 0.6, 1.0), prompt_tokens=100, completion_tokens=11, counted=True)
    assert sample.ttft == 0.5
    assert sample.prefill_rate == 200
    assert sample.decode_rate == pytest.approx(10 / 0.5)
    assert sample.gaps == pytest.approx([0.1, 0.4])


def test_one_chunk_has_no_decode_rate():
    assert Sample((0.5,), 100, 3, True).decode_rate is None


def test_a_spread_of_a_hundred_values():
    assert Spread.of([float(value) for value in range(100, 0, -1)]) == Spread(50.5, 1, 100, 95)
    assert Spread.of([]) is None


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_a_spread_is_in_order(values: list[float]):
    spread = Spread.of(values)
    assert spread is not None
    assert min(values) == spread.low <= spread.median <= spread.p95 <= spread.high == max(values)


@given(st.integers(1, 500), st.integers(0, 600))
def test_a_prompt_has_as_many_words_as_asked(words: int, shared: int):
    prompt = make_prompt(words, "seed", shared=shared)
    assert len(prompt.split()) == words
    assert prompt.split()[:shared] == make_prompt(words, "other", shared=shared).split()[:shared]


# The report


async def test_the_result_as_json_and_as_a_table():
    async with serving(Stub(usage=False)) as stub:
        result = await run(options(stub))
    data = json.loads(to_json(result))
    assert data["rows"][0]["ttft"]["median"] == result.rows[0].ttft.median
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(to_table(result))
    text = console.export_text()
    for word in ("m at http", "first token ms", "total tok/s", "~5", "one chunk counts as one"):
        assert word in text
