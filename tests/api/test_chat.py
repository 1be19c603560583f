"""POST /v1/chat/completions through OpenAI's own client, held to its types."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from emlxd.api.logprobs import token_objects
from emlxd.api.schema import ChatBody
from emlxd.core import TokenLogprob
from tests.api.conftest import Server
from tests.api.strict import assert_known_fields
from tests.fakes import ByteTokenizer, score

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
SAID = "one two three four five six"


async def test_whole_answer(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="org/fake-1b", messages=HELLO)
    assert_known_fields(answer)
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
    assert answer.model == "org/fake-1b"
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content, choice.message.refusal) == ("assistant", SAID, None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len("user:hi\n"), 6)
    assert answer.usage.total_tokens == len("user:hi\n") + 6
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_required_keys_are_present(http: httpx.AsyncClient) -> None:
    """The SDK fills in missing keys with None; the wire must have them."""
    response = await http.post("/v1/chat/completions", json={"model": "fake", "messages": HELLO})
    (choice,) = response.json()["choices"]
    assert choice.keys() == {"index", "message", "finish_reason", "logprobs"}
    assert choice["message"].keys() == {"role", "content", "refusal"}
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"].startswith("req_")


async def stream(client: openai.AsyncOpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    fields = {"model": "fake", "messages": HELLO} | fields
    chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **fields)]
    for chunk in chunks:
        assert_known_fields(chunk)
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    return chunks


async def test_stream_order(client: openai.AsyncOpenAI) -> None:
    chunks = await stream(client)
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks]
    words = ["one", " two", " three", " four", " five", " six"]
    assert deltas == [{"role": "assistant", "content": ""}, *({"content": word} for word in words), {}]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 7 + ["stop"]
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


async def test_usage_chunk_only_when_asked(client: openai.AsyncOpenAI) -> None:
    """Edge case 8."""
    chunks = await stream(client, stream_options={"include_usage": True})
    *before, last = chunks
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 6
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in before)
    assert before[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("streams", [True, False])
async def test_token_limit(client: openai.AsyncOpenAI, field: str, streams: bool) -> None:
    """Edge cases 9 and 21."""
    fields: dict[str, Any] = {"model": "fake", "messages": HELLO, field: 2}
    if streams:
        chunks = await stream(client, **fields)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        answer = await client.chat.completions.create(**fields)
        text, reason = answer.choices[0].message.content or "", answer.choices[0].finish_reason
    assert (text, reason) == ("one two", "length")


async def test_max_completion_tokens_supersedes(server: Server, client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=5, max_completion_tokens=3)
    assert server.worker.submitted[-1].max_tokens == 3


@pytest.mark.parametrize("limit", [None, 1_000_000])
async def test_limit_is_clamped_to_the_context(
    server: Server, client: openai.AsyncOpenAI, limit: int | None
) -> None:
    """Edge case 23."""
    await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=limit)
    assert server.worker.submitted[-1].max_tokens == 1000 - len("user:hi\n")


async def test_zero_tokens(server: Server, client: openai.AsyncOpenAI) -> None:
    """Edge case 23."""
    answer = await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=0)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "length")
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    chunks = await stream(client, max_tokens=0)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "length"]
    assert [request.max_tokens for request in server.worker.submitted] == [0, 0]


async def test_stop_is_passed_on(server: Server, client: openai.AsyncOpenAI) -> None:
    """Edge case 2."""
    answer = await client.chat.completions.create(model="fake", messages=HELLO, stop=[" four", "e f"])
    assert server.worker.submitted[-1].stop == (" four", "e f")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one two thre", "stop")
    assert answer.usage is not None and answer.usage.completion_tokens == 6
    chunks = await stream(client, stop=" four")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one two three"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_n_choices(server: Server, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="fake", messages=HELLO, n=3, seed=5)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [
        (index, SAID) for index in range(3)
    ]
    (request,) = server.worker.submitted
    assert (request.n, request.sampling.seed) == (3, 5)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len("user:hi\n"), 18)
    chunks = await stream(client, n=3)
    for index in range(3):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert mine[0].delta.role == "assistant" and mine[-1].finish_reason == "stop"
        assert "".join(choice.delta.content or "" for choice in mine) == SAID


async def test_sampling(server: Server, client: openai.AsyncOpenAI) -> None:
    """What is absent or null is the model's default; what is given is taken, 0 included."""
    await client.chat.completions.create(model="fake", messages=HELLO)
    defaults = server.worker.submitted[-1].sampling
    assert defaults == server.worker.info.sampling
    await client.chat.completions.create(
        model="fake",
        messages=HELLO,
        temperature=0,
        top_p=1,
        seed=0,
        extra_body={"top_k": -1, "min_p": 0.25, "stream_chunks": "token"},
    )
    request = server.worker.submitted[-1]
    params = request.sampling
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0, 1, 0, 0.25, 0)
    assert request.chunking == "token"
    for next_to_nothing in ({"top_p": 0}, {"top_p": 1e-300}, {"temperature": 1e-40}):
        await client.chat.completions.create(model="fake", messages=HELLO, **next_to_nothing)
        assert server.worker.submitted[-1].sampling.greedy


# Hints for OpenAI's caches, accounts and abuse checks.
WITHOUT_EFFECT = {
    "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "user",
}  # fmt: skip
OPENAI_FIELDS = set(CompletionCreateParamsBase.__annotations__)


def test_every_field_of_openai_has_a_place() -> None:
    assert OPENAI_FIELDS - set(ChatBody.model_fields) - set(ChatBody.refused) == WITHOUT_EFFECT


async def test_every_optional_field_may_be_null(http: httpx.AsyncClient) -> None:
    names = {*OPENAI_FIELDS, *ChatBody.model_fields, *ChatBody.refused}
    body = dict.fromkeys(names) | {"model": "fake", "messages": HELLO}
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200


async def test_fields_that_ask_for_nothing_are_accepted(http: httpx.AsyncClient) -> None:
    body = {
        "model": "fake", "messages": HELLO, "frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {},
        "logprobs": False, "n": 1, "response_format": {"type": "text"}, "store": False, "tools": [],
        "tool_choice": "auto", "service_tier": "auto", "modalities": ["text"], "metadata": {"a": "b"},
        "user": "me", "parallel_tool_calls": True, "no_such_field": {"x": 1}, "stop": [],
    }  # fmt: skip
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200


async def test_alias_resolves(client: openai.AsyncOpenAI) -> None:
    """Edge case 13."""
    answer = await client.chat.completions.create(model="fake", messages=HELLO)
    assert answer.model == "org/fake-1b"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_what_was_thought_reaches_the_template(
    server: Server, client: openai.AsyncOpenAI, field: str
) -> None:
    messages: Any = [*HELLO, {"role": "assistant", "content": "Yes.", field: "Hm."}, *HELLO]
    await client.chat.completions.create(model="fake", messages=messages)
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert server.worker.chats[-1]["messages"][1] == said


async def test_messages_reach_the_template(server: Server, client: openai.AsyncOpenAI) -> None:
    """Edge cases 5, 6 and 7: all roles, text parts in order, and a call without content is not dropped."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {"role": "system", "content": parts},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": parts, "tool_call_id": "call_1"},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "user", "content": "go on", "unknown": 1},
    ]
    await client.chat.completions.create(model="fake", messages=messages)
    sent = server.worker.chats[-1]["messages"]
    assert sent[:3] == messages[:3]
    assert sent[3] == {"role": "assistant", "tool_calls": [call]}
    assert sent[4] == messages[4]
    assert sent[5] == {"role": "assistant", "content": "no"}
    assert sent[6] == {"role": "user", "content": "go on"}


PREFILL = [*HELLO, {"role": "assistant", "content": "Sure"}]


@pytest.mark.parametrize(
    ("messages", "fields", "begins", "continues"),
    [
        (HELLO, {}, True, False),
        (PREFILL, {}, False, True),
        (PREFILL, {"add_generation_prompt": True}, True, False),
        (PREFILL, {"continue_final_message": False}, True, False),
        (HELLO, {"add_generation_prompt": False}, False, False),
        (HELLO, {"continue_final_message": True}, False, True),
        ([*HELLO, {"role": "assistant", "content": ""}], {}, True, False),
    ],
)
async def test_prefill(
    server: Server,
    client: openai.AsyncOpenAI,
    messages: list[Any],
    fields: dict[str, bool],
    begins: bool,
    continues: bool,
) -> None:
    await client.chat.completions.create(model="fake", messages=messages, extra_body=fields)
    chat = server.worker.chats[-1]
    assert (chat["begins"], chat["continues"]) == (begins, continues)
    assert server.worker.submitted[-1].continues == continues


@pytest.mark.parametrize("variables", [{"enable_thinking": False}, {"self": 1, "worker": 2}])
async def test_chat_template_kwargs(
    server: Server, client: openai.AsyncOpenAI, variables: dict[str, Any]
) -> None:
    await client.chat.completions.create(
        model="fake", messages=HELLO, extra_body={"chat_template_kwargs": variables}
    )
    assert server.worker.chats[-1]["kwargs"] == variables


async def test_penalties_biases_and_ends(server: Server, client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(
        model="fake",
        messages=HELLO,
        presence_penalty=-2,
        frequency_penalty=1.5,
        logit_bias={"5": -100, "0": 100},
        seed=-(2**63),
        max_tokens=9,
        extra_body={"repetition_penalty": 1.2, "min_tokens": 9, "ignore_eos": True},
    )
    request = server.worker.submitted[-1]
    params = request.sampling
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-2, 1.5, 1.2)
    assert (params.logit_bias, params.seed) == (((5, -100), (0, 100)), -(2**63))
    assert (params.min_tokens, request.ignore_eos, params.logprobs) == (9, True, None)


def shown(token: int, likeliest: int) -> dict[str, Any]:
    entry = score(token, likeliest)
    tops = [{"token": chr(top), "logprob": logprob, "bytes": [top]} for top, logprob in entry.top]
    return {"token": chr(token), "logprob": entry.logprob, "bytes": [token], "top_logprobs": tops}


@pytest.mark.parametrize("likeliest", [0, 2])
async def test_logprobs(client: openai.AsyncOpenAI, likeliest: int) -> None:
    """Edge case 19: filled, whole and streamed, each chunk with the tokens of its own text."""
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": likeliest}
    answer = await client.chat.completions.create(model="fake", messages=HELLO, **asked)
    assert_known_fields(answer)
    found = answer.choices[0].logprobs
    assert found is not None and found.content is not None and found.refusal is None
    assert [entry.model_dump() for entry in found.content] == [
        shown(byte, likeliest) for byte in SAID.encode()
    ]
    chunks = await stream(client, **asked)
    for chunk in chunks[1:-1]:
        (choice,) = chunk.choices
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.delta.content
    assert chunks[0].choices[0].logprobs is None and chunks[-1].choices[0].logprobs is None


async def test_a_token_that_is_part_of_a_character_shows_its_bytes(
    server: Server, client: openai.AsyncOpenAI
) -> None:
    server.worker.words = ["é"]
    answer = await client.chat.completions.create(model="fake", messages=HELLO, logprobs=True)
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    entries = answer.choices[0].logprobs.content
    assert [entry.token for entry in entries] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert bytes(byte for entry in entries for byte in entry.bytes or []).decode() == "é"


def test_a_special_token_adds_no_bytes_to_the_text() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.text_bytes = (*tokenizer.text_bytes[:7], b"", *tokenizer.text_bytes[8:])
    (entry,) = token_objects(tokenizer, [TokenLogprob(7, -1.0, ((65, -2.0),))])
    assert (entry["token"], entry["bytes"], entry["top_logprobs"][0]["bytes"]) == ("\x07", [], [65])


def test_an_impossible_token_has_openais_number() -> None:
    assert token_objects(ByteTokenizer(), [TokenLogprob(97, -float("inf"))]) == [
        {"token": "a", "logprob": -9999.0, "bytes": [97], "top_logprobs": []}
    ]
