"""POST /v1/completions through OpenAI's own client, held to its types."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.completion_create_params import CompletionCreateParamsBase

from emlxd.api.fields import NOT_IMPLEMENTED
from emlxd.api.schema import CompletionBody
from tests.api.conftest import Server
from tests.api.strict import assert_known_fields

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
    assert [choice.index for choice in answer.choices] == list(range(len(tokens)))


async def test_choices_of_several_prompts(server: Server, client: openai.AsyncOpenAI) -> None:
    answer = await complete(client, ["x", "yz"], n=2, best_of=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["x" + SAID, "x" + SAID, "yz" + SAID, "yz" + SAID]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({request.id for request in server.worker.submitted}) == 4
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
    assert server.worker.submitted == []


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
    assert fields - set(CompletionBody.model_fields) - set(NOT_IMPLEMENTED) == {"user"}


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
        ({"logprobs": 0}, "logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"echo": "yes"}, "echo"),
    ],
)
async def test_refusals(http: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    response = await http.post("/v1/completions", json={"model": "fake", "prompt": "a"} | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
