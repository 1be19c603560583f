"""POST /v1/completions through OpenAI's own client, held to its types."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.completion_create_params import CompletionCreateParamsBase

from emlxd.api.logprobs import TextLogprobs
from emlxd.api.schema import CompletionBody
from tests.api.conftest import Server
from tests.api.strict import assert_known_fields
from tests.fakes import ByteTokenizer, score

SAID = "one two three four five six"


async def complete(client: openai.AsyncOpenAI, prompt: Any, **fields: Any) -> Completion:
    answer: Completion = await client.completions.create(model="fake", prompt=prompt, **fields)
    assert_known_fields(answer)
    Completion.model_validate(answer.model_dump(), strict=True)
    return answer


async def stream(client: openai.AsyncOpenAI, prompt: Any, **fields: Any) -> list[Completion]:
    chunks = [
        chunk
        async for chunk in await client.completions.create(model="fake", prompt=prompt, stream=True, **fields)
    ]
    for chunk in chunks:
        assert_known_fields(chunk)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    return chunks


def texts(chunks: list[Completion], count: int) -> list[str]:
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    return ["".join(choice.text for choice in choices if choice.index == index) for index in range(count)]


async def test_whole_and_stream(server: Server, client: openai.AsyncOpenAI) -> None:
    answer = await complete(client, "abc")
    assert answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (SAID, "stop")
    assert answer.usage is not None and answer.usage.prompt_tokens == 3
    assert server.worker.submitted[-1].max_tokens == 16
    chunks = await stream(client, "abc", stream_options={"include_usage": True})
    assert texts(chunks, 1) == [SAID]
    *before, end, usage = chunks
    assert [chunk.choices[0].finish_reason for chunk in before] == [None] * 6
    assert end.choices[0].finish_reason == "stop"
    assert usage.choices == [] and usage.usage is not None and usage.usage.total_tokens == 9


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [(97, 98)]),
        (["ab", "c"], [(97, 98), (99,)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
    ],
)
async def test_prompt_kinds(
    server: Server, client: openai.AsyncOpenAI, prompt: Any, tokens: list[tuple[int, ...]]
) -> None:
    answer = await complete(client, prompt)
    assert [request.prompt for request in server.worker.submitted] == tokens
    assert all(request.continues for request in server.worker.submitted)
    assert [choice.index for choice in answer.choices] == list(range(len(tokens)))


async def test_choices_of_several_prompts(server: Server, client: openai.AsyncOpenAI) -> None:
    answer = await complete(client, ["x", "yz"], n=2, best_of=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["x" + SAID, "x" + SAID, "yz" + SAID, "yz" + SAID]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [(request.n, request.prompt) for request in server.worker.submitted] == [
        (2, (120,)),
        (2, (121, 122)),
    ]
    assert len({request.id for request in server.worker.submitted}) == 2
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 24)
    chunks = await stream(client, ["x", "yz"], n=2, echo=True)
    assert texts(chunks, 4) == [choice.text for choice in answer.choices]


async def test_echo_without_generation(server: Server, client: openai.AsyncOpenAI) -> None:
    answer = await complete(client, [104, 105], echo=True, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hi", "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 0)
    assert texts(await stream(client, "hi", echo=True, max_tokens=0), 1) == ["hi"]
    assert [request.max_tokens for request in server.worker.submitted] == [0, 0]


async def test_several_prompts_are_taken_all_or_none(server: Server, client: openai.AsyncOpenAI) -> None:
    server.worker.max_running = 2
    answer = await client.completions.create(model="fake", prompt=["a", "b", "c", "d"])
    assert len(answer.choices) == 4
    server.worker.max_running = 0
    with pytest.raises(openai.RateLimitError):
        await client.with_options(max_retries=0).completions.create(model="fake", prompt=["a", "b"])
    assert len(server.worker.submitted) == 4


async def test_how_many_answers_a_request_may_ask_for(server: Server, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="17 prompts with 128 answers each are 2176 answers"):
        await client.completions.create(model="fake", prompt=["a"] * 17, n=128)
    assert server.worker.submitted == []


async def test_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await complete(client, "abc", logprobs=2, max_tokens=2)
    found = answer.choices[0].logprobs
    assert found is not None and found.tokens == list("one two")
    assert found.token_logprobs == [-byte / 8 for byte in b"one two"]
    assert found.text_offset == list(range(7))
    assert found.top_logprobs is not None
    assert found.top_logprobs[0] == {"o": -ord("o") / 8, "p": -ord("p") / 8}
    none = await complete(client, "abc", logprobs=0, max_tokens=1)
    assert none.choices[0].logprobs is not None
    assert none.choices[0].logprobs.top_logprobs == [{letter: -ord(letter) / 8} for letter in "one"]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("prompt", ["né!", list("né!".encode())])
async def test_scores_of_a_prompt(
    server: Server, client: openai.AsyncOpenAI, prompt: Any, max_tokens: int
) -> None:
    """What evaluation harnesses send: the prompt's entries, the first without a score, and the answer's."""
    server.worker.words = ["X", "Y"]
    # The published types know no null, which OpenAI sends for the first token all the same.
    answer = await client.completions.create(
        model="fake", prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, n=2, temperature=0
    )
    assert_known_fields(answer)
    request = server.worker.submitted[-1]
    assert (request.prompt_logprobs, request.max_tokens, request.sampling.logprobs) == (1, max_tokens, 1)
    assert request.ignore_eos == (max_tokens == 1)
    for choice in answer.choices:
        assert choice.text == "né!X"[: 3 + max_tokens]
        found = choice.logprobs
        assert found is not None and found.token_logprobs is not None and found.top_logprobs is not None
        assert found.tokens == ["n", "bytes:\\xc3", "bytes:\\xa9", "!", "X"][: 4 + max_tokens]
        scores = [None, *(-byte / 8 for byte in "é!X".encode())]
        assert found.token_logprobs == scores[: 4 + max_tokens]
        assert found.top_logprobs[0] is None and found.top_logprobs[3] == {"!": -ord("!") / 8}
        assert found.text_offset == [0, 1, 1, 2, 3][: 4 + max_tokens]
    chunks = await stream(client, prompt, echo=True, logprobs=1, max_tokens=max_tokens, n=2)
    assert texts(chunks, 2) == [choice.text for choice in answer.choices]


class WithBegin(ByteTokenizer):
    """Token 1 begins every prompt, and text is written with a space before it."""

    strips_leading_space = True

    def token_bytes(self, token_id: int) -> bytes:
        return b"<s>" if token_id == 1 else super().token_bytes(token_id)


def test_offsets_skip_what_is_not_in_the_text() -> None:
    texts = TextLogprobs(WithBegin())
    part = texts.prompt("hi", [1, *b" hi"], [None, *(score(byte, 0) for byte in b" hi")])
    assert part["tokens"] == ["<s>", " ", "h", "i"]
    assert part["text_offset"] == [0, 0, 0, 1]
    assert texts.answer([score(byte, 0) for byte in b" x"])["text_offset"] == [2, 2]


def test_offsets_count_what_stands_for_bytes_that_are_no_text() -> None:
    """As the text does: a lone byte of the middle of a character is one, and so is a character cut short."""
    texts = TextLogprobs(ByteTokenizer())
    data = b"a\x80b\xe2\x82c\xc3\xa9d"
    found = texts.answer([score(byte, 0) for byte in data])["text_offset"]
    text = data.decode("utf-8", "replace")
    assert [text[offset] for offset in found] == list("a\ufffdb\ufffd\ufffdcééd")


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_a_full_context_takes_no_token_more(client: openai.AsyncOpenAI, max_tokens: int) -> None:
    prompt = "x" * 1000
    if max_tokens == 0:
        assert (await complete(client, prompt, echo=True, max_tokens=0)).choices[0].text == prompt
        return
    with pytest.raises(openai.BadRequestError) as caught:
        await complete(client, prompt, max_tokens=max_tokens)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_every_field_of_openai_has_a_place() -> None:
    fields = set(CompletionCreateParamsBase.__annotations__)
    assert fields - set(CompletionBody.model_fields) - set(CompletionBody.refused) == {"user"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [256]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"echo": "yes"}, "echo"),
    ],
)
async def test_refusals(http: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    response = await http.post("/v1/completions", json={"model": "fake", "prompt": "a"} | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
