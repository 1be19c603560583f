"""POST /v1/messages through Anthropic's own client, held to its types."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.message_create_params import MessageCreateParamsBase
from pydantic import TypeAdapter

from emlxd.api.messages_schema import MessagesBody
from emlxd.core import TextPiece, ToolCallPiece
from emlxd.errors import EmlxdError, QueueFull, ServerFault, Unavailable
from tests.api.conftest import Server, start_server
from tests.api.strict import assert_known_fields
from tests.api.wire import connect

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
SAID = "one two three four five six"
PATH = "/v1/messages"


@pytest.fixture
async def claude(server: Server) -> AsyncIterator[anthropic.AsyncAnthropic]:
    plain = anthropic.DefaultAsyncHttpxClient(verify=False)
    async with anthropic.AsyncAnthropic(
        base_url=server.url, api_key="unused", max_retries=0, timeout=20, http_client=plain
    ) as sdk:
        yield sdk


async def ask(claude: anthropic.AsyncAnthropic, **fields: Any) -> Message:
    body: Any = {"model": "fake", "max_tokens": 100, "messages": HELLO} | fields
    answer: Message = await claude.messages.create(**body)
    assert_known_fields(answer)
    Message.model_validate(answer.model_dump(), strict=True)
    return answer


async def test_whole_answer(claude: anthropic.AsyncAnthropic) -> None:
    answer = await ask(claude)
    assert answer.id.startswith("msg_") and answer._request_id and answer._request_id.startswith("req_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "org/fake-1b")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert [block.model_dump(exclude_unset=True) for block in answer.content] == [
        {"type": "text", "text": SAID}
    ]
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (len("user:hi\n") - 1, 1)
    assert (usage.output_tokens, usage.cache_creation_input_tokens) == (6, 0)


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({}, "end_turn", None, SAID),
        ({"max_tokens": 2}, "max_tokens", None, "one two"),
        ({"stop_sequences": [" four", "e f"]}, "stop_sequence", "e f", "one two thre"),
        ({"stop_sequences": [f"no {n}" for n in range(9)]}, "end_turn", None, SAID),
    ],
)
async def test_why_it_stopped(
    claude: anthropic.AsyncAnthropic, fields: dict[str, Any], reason: str, sequence: str | None, text: str
) -> None:
    answer = await ask(claude, **fields)
    assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)
    (block,) = answer.content
    assert block.type == "text" and block.text == text


async def test_streamed_and_whole_are_the_same_message(claude: anthropic.AsyncAnthropic) -> None:
    whole = await ask(claude)
    async with claude.messages.stream(model="fake", max_tokens=100, messages=HELLO) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == SAID
    known = {"content", "model", "role", "stop_reason", "stop_sequence", "type", "usage"}
    assert final.model_dump(include=known) == whole.model_dump(include=known)


async def raw_events(server: Server, **fields: Any) -> list[tuple[str, Any]]:
    async with connect(server.port) as wire:
        body = {"model": "fake", "max_tokens": 100, "messages": HELLO, "stream": True} | fields
        await wire.post(PATH, body)
        status, headers = await wire.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        *frames, end = (await wire.body()).decode().split("\n\n")
    assert end == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == event["type"] for name, event in events)
    return events


async def test_order_of_events(server: Server) -> None:
    events = await raw_events(server)
    assert [name for name, _ in events] == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * 6,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    for name, event in events:
        if name != "ping":
            found: Any = TypeAdapter(RawMessageStreamEvent).validate_python(event)
            assert_known_fields(found)
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == len("user:hi\n")
    delta = events[-2][1]
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 6


async def test_an_answer_without_text_has_no_block(server: Server, claude: anthropic.AsyncAnthropic) -> None:
    server.worker.words = []
    assert (await ask(claude)).content == []
    names = [name for name, _ in await raw_events(server)]
    assert names == ["message_start", "ping", "message_delta", "message_stop"]


async def test_failure_in_mid_stream(server: Server, claude: anthropic.AsyncAnthropic) -> None:
    server.worker.failure, server.worker.fail_after = ServerFault("it broke"), 2
    *_, last = await raw_events(server)
    assert last == (
        "error",
        {"type": "error", "error": {"type": "api_error", "message": "it broke"}},
    )
    heard = ""
    with pytest.raises(anthropic.APIStatusError, match="it broke"):
        async with claude.messages.stream(model="fake", max_tokens=9, messages=HELLO) as stream:
            async for text in stream.text_stream:
                heard += text
    assert heard == "one two"


async def test_a_conversation_reaches_the_template(server: Server, claude: anthropic.AsyncAnthropic) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]}
    failed = {"type": "tool_result", "tool_use_id": "t2", "content": "no disk", "is_error": True}
    await ask(
        claude,
        system=[{"type": "text", "text": "be"}, {"type": "text", "text": " brief"}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": "b"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Let me see"},
                    use,
                ],
            },
            {"role": "user", "content": [result, failed, {"type": "text", "text": "and?"}]},
        ],
    )
    chat = server.worker.chats[-1]
    assert chat["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": " brief"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": "Let me see",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "42"},
        {
            "role": "tool",
            "tool_call_id": "t2",
            "content": [{"type": "text", "text": "Error: "}, {"type": "text", "text": "no disk"}],
        },
        {"role": "user", "content": "and?"},
    ]
    assert (chat["begins"], chat["continues"]) == (True, False)


async def test_a_begun_answer_is_continued(server: Server, claude: anthropic.AsyncAnthropic) -> None:
    await ask(claude, messages=[*HELLO, {"role": "assistant", "content": "Sure, "}])
    chat = server.worker.chats[-1]
    assert (chat["begins"], chat["continues"]) == (False, True)


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
async def test_an_empty_last_turn_begins_no_answer(
    server: Server, claude: anthropic.AsyncAnthropic, content: Any
) -> None:
    await ask(claude, messages=[*HELLO, {"role": "assistant", "content": content}])
    chat = server.worker.chats[-1]
    assert (chat["begins"], chat["continues"]) == (True, False)
    assert [message["role"] for message in chat["messages"]] == ["user"]


async def test_sampling(server: Server, claude: anthropic.AsyncAnthropic) -> None:
    await ask(claude, extra_body={"temperature": 0.0, "top_p": 0.5, "top_k": 3, "seed": 0, "min_p": 0.1})
    params = server.worker.submitted[-1].sampling
    assert (params.temperature, params.top_p, params.top_k, params.seed, params.min_p) == (0, 0.5, 3, 0, 0.1)


async def test_count_tokens(
    server: Server, claude: anthropic.AsyncAnthropic, http: httpx.AsyncClient
) -> None:
    counted = await claude.messages.count_tokens(model="fake", messages=HELLO, system="be brief")
    assert counted.input_tokens == len("system:be brief\nuser:hi\n")
    response = await http.post(f"{PATH}/count_tokens", json={"model": "fake", "messages": HELLO})
    assert response.json() == {"input_tokens": len("user:hi\n")}
    assert server.worker.submitted == []


ADD: Any = {"name": "add", "description": "a + b", "input_schema": {"type": "object", "properties": {}}}
CALLS = (
    TextPiece("Hm", channel="reasoning"),
    TextPiece("Wait."),
    ToolCallPiece(0, "", "call_1", "add"),
    ToolCallPiece(0, '{"a":'),
    ToolCallPiece(0, " 1}"),
    ToolCallPiece(1, "{}", "call_2", "add"),
)


async def test_thoughts_and_calls(server: Server, claude: anthropic.AsyncAnthropic) -> None:
    server.worker.says = CALLS
    answer = await ask(claude, tools=[ADD])
    assert answer.stop_reason == "tool_use"
    assert [block.model_dump(exclude_none=True) for block in answer.content] == [
        {"type": "thinking", "thinking": "Hm", "signature": ""},
        {"type": "text", "text": "Wait."},
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_2", "name": "add", "input": {}},
    ]
    async with claude.messages.stream(model="fake", max_tokens=9, messages=HELLO, tools=[ADD]) as stream:
        final = await stream.get_final_message()
    assert [block.model_dump(exclude_none=True, exclude={"parsed_output"}) for block in final.content] == [
        block.model_dump(exclude_none=True) for block in answer.content
    ]
    events = await raw_events(server, tools=[ADD])
    assert [(event["type"], event["index"]) for _, event in events if "index" in event] == [
        (f"content_block_{step}", index)
        for index, deltas in enumerate([1, 1, 3, 1])
        for step in ("start", *["delta"] * deltas, "stop")
    ]
    kinds = [event["delta"]["type"] for _, event in events if event["type"] == "content_block_delta"]
    assert kinds == ["thinking_delta", "text_delta", *["input_json_delta"] * 4]


@pytest.mark.parametrize(
    ("written", "whole"),
    [
        ("", {}),
        ('{"a":', {}),
        ('{"a": "x", "b": [1, 2', {"a": "x"}),
        ('{"a": "x, {", "b": {"c": 1, "d": 2}', {"a": "x, {", "b": {"c": 1, "d": 2}}),
        ('{"a": "x, {", "b": "\\", ', {"a": "x, {"}),
        ('{"a": "x", "b": "y"', {"a": "x", "b": "y"}),
        ('{"a": "x", "b": "y\\"', {"a": "x"}),
        ('{"a": "x", "b": 12', {"a": "x"}),
        ('{"a": 12', {}),
        ('{"a": 1}', {"a": 1}),
    ],
)
async def test_a_call_that_was_cut_off(
    server: Server, claude: anthropic.AsyncAnthropic, written: str, whole: dict[str, Any]
) -> None:
    """The stream has all that was written, and a whole answer the members that are whole."""
    server.worker.says = (ToolCallPiece(0, "", "call_1", "add"), ToolCallPiece(0, written))
    server.worker.cut_off = True
    answer = await ask(claude, tools=[ADD])
    (block,) = answer.content
    assert block.type == "tool_use" and block.input == whole
    assert answer.stop_reason == "max_tokens"
    events = [event for _, event in await raw_events(server, tools=[ADD])]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["partial_json"] for delta in deltas) == written
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("choice", "wished"),
    [
        (None, ("auto", None, True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", None, False)),
        ({"type": "any"}, ("required", None, True)),
        ({"type": "tool", "name": "add"}, ("required", "add", True)),
        ({"type": "none"}, ("none", None, True)),
    ],
)
async def test_what_is_asked_of_the_worker(
    server: Server, http: httpx.AsyncClient, choice: Any, wished: tuple[str, str | None, bool]
) -> None:
    thinking = {"type": "enabled", "budget_tokens": 100}
    body = {"model": "fake", "max_tokens": 9, "messages": HELLO, "tools": [ADD], "thinking": thinking}
    assert (await http.post(PATH, json=body | {"tool_choice": choice})).status_code == 200
    asked = server.worker.wishes[-1]
    assert (asked.choice, asked.named, asked.parallel) == wished
    assert [tool.name for tool in asked.tools] == ["add"] and asked.max_reasoning_tokens == 100
    chat = server.worker.chats[-1]
    parameters = {"type": "object", "properties": {}}
    told = {"type": "function", "function": {"name": "add", "description": "a + b", "parameters": parameters}}
    assert chat["tools"] == (None if wished[0] == "none" else [told])
    assert chat["kwargs"] == {"enable_thinking": True}


def refusal_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error"} and body["type"] == "error"
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"type", "message"} and error["message"]
    return error


def turn(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        (turn(), "messages[0].content"),
        (turn("x"), "messages[0].content[0]"),
        (turn({"type": "text"}), "messages[0].content[0].text"),
        (turn({"type": "image", "source": {}}), "'image' is not supported"),
        (turn({"type": "document", "source": {}}), "'document' is not supported"),
        (turn({"type": "tool_use", "id": "a", "name": "f", "input": {}}), "cannot come from 'user'"),
        (turn({"type": "tool_use", "id": "a", "name": "f"}, role="assistant"), "content[0].input"),
        (turn({"type": "tool_result", "content": "x"}), "content[0].tool_use_id"),
        (turn({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}), "'image'"),
        ({"system": 7}, "system"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [ADD, ADD]}, "same name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "high"}}, "output_config"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "1000 tokens"),
    ],
)  # fmt: skip
async def test_bad_requests(http: httpx.AsyncClient, fields: dict[str, Any], named: str) -> None:
    body = {"model": "fake", "max_tokens": 9, "messages": HELLO} | fields
    error = refusal_of(await http.post(PATH, json=body), 400)
    assert error["type"] == "invalid_request_error" and named in error["message"]


WITHOUT_EFFECT = {
    "cache_control", "diagnostics", "inference_geo", "metadata", "user_profile_id", "workspace_id",
}  # fmt: skip


def test_every_field_of_anthropic_has_a_place() -> None:
    fields = set(MessageCreateParamsBase.__annotations__)
    assert fields - set(MessagesBody.model_fields) - set(MessagesBody.refused) == WITHOUT_EFFECT


async def test_fields_that_ask_for_nothing_are_accepted(http: httpx.AsyncClient) -> None:
    body = {"model": "fake", "max_tokens": 9, "messages": HELLO}
    nothing = {
        "tools": [], "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}, "speed": "standard",
        "service_tier": "auto", "metadata": {"user_id": "a"}, "stop_sequences": None,
        "system": None, "no_such_field": 1,
    }  # fmt: skip
    assert (await http.post(PATH, json=body | nothing)).status_code == 200
    nulls = dict.fromkeys([*MessagesBody.model_fields, *MessagesBody.refused])
    assert (await http.post(PATH, json=nulls | body)).status_code == 200


@pytest.mark.parametrize(
    ("failure", "status", "type"),
    [
        (QueueFull("full"), 429, "rate_limit_error"),
        (Unavailable("loading", retry_after=3), 529, "overloaded_error"),
        (ServerFault("broken"), 500, "api_error"),
    ],
)
async def test_failures_before_any_byte(
    server: Server, http: httpx.AsyncClient, failure: EmlxdError, status: int, type: str
) -> None:
    server.worker.failure = failure
    response = await http.post(PATH, json={"model": "fake", "max_tokens": 9, "messages": HELLO})
    assert refusal_of(response, status) == {"type": type, "message": failure.message}
    assert response.headers.get("retry-after") == (str(failure.retry_after) if status != 500 else None)  # type: ignore[attr-defined]


async def test_other_statuses(http: httpx.AsyncClient, claude: anthropic.AsyncAnthropic) -> None:
    assert refusal_of(await http.get(PATH), 405)["type"] == "invalid_request_error"
    assert refusal_of(await http.post(f"{PATH}/batches", json={}), 404)["type"] == "not_found_error"
    assert refusal_of(await http.post(PATH, content=b"{"), 400)
    with pytest.raises(anthropic.NotFoundError):
        await ask(claude, model="none")


async def test_keys() -> None:
    async with start_server(api_keys=("k-1",)) as server, httpx.AsyncClient(base_url=server.url) as http:
        error = refusal_of(await http.post(PATH, json={}), 401)
        assert error["type"] == "authentication_error"
        plain = anthropic.DefaultAsyncHttpxClient(verify=False)
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="k-1", http_client=plain) as sdk:
            assert (await ask(sdk)).content
