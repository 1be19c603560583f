"""Tools, formats and thinking: what the API asks a worker for, and how it says what came of it."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion

from emlxd.core import TextPiece, Tool, ToolCallPiece
from tests.api.conftest import Server
from tests.api.strict import assert_known_fields

CHAT, HELLO = "/v1/chat/completions", [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
NOW: Any = {"type": "function", "function": {"name": "now", "strict": True}}
CALLS = (
    ToolCallPiece(0, "", "call_1", "add"),
    ToolCallPiece(0, '{"a":'),
    ToolCallPiece(0, " 1}"),
    ToolCallPiece(1, "{}", "call_2", "now"),
)
THOUGHT = (TextPiece("Hm", channel="reasoning"), TextPiece(".", channel="reasoning"), TextPiece("Yes."))


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | fields}


async def post(http: httpx.AsyncClient, path: str = CHAT, **fields: Any) -> httpx.Response:
    base = {"model": "fake", "messages": HELLO} if path == CHAT else {"model": "fake", "prompt": "p"}
    return await http.post(path, json=base | fields)


async def test_tool_calls_whole(server: Server, client: openai.AsyncOpenAI) -> None:
    server.worker.says = CALLS
    messages: Any = HELLO
    answer = await client.chat.completions.create(model="fake", messages=messages, tools=[ADD, NOW])
    assert_known_fields(answer)
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    calls: Any = choice.message.tool_calls
    assert [(call.id, call.type, call.function.name, call.function.arguments) for call in calls] == [
        ("call_1", "function", "add", '{"a": 1}'),
        ("call_2", "function", "now", "{}"),
    ]


async def test_tool_calls_streamed(server: Server, client: openai.AsyncOpenAI) -> None:
    """Edge cases 10 and 11."""
    server.worker.says = CALLS
    messages: Any = HELLO
    stream = await client.chat.completions.create(model="fake", messages=messages, tools=[ADD], stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    told = [(c.index, c.id, c.function and (c.function.name, c.function.arguments)) for c in calls]
    assert told == [
        (0, "call_1", ("add", "")),
        (0, None, (None, '{"a":')),
        (0, None, (None, " 1}")),
        (1, "call_2", ("now", "{}")),
    ]


async def test_thinking_is_told_apart(server: Server, http: httpx.AsyncClient) -> None:
    server.worker.says = THOUGHT
    answer = (await post(http)).json()
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Yes.", "Hm.", "Hm.")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


async def test_thinking_streamed(server: Server, client: openai.AsyncOpenAI) -> None:
    server.worker.says = THOUGHT
    messages: Any = HELLO
    stream = await client.chat.completions.create(model="fake", messages=messages, stream=True)
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) async for chunk in stream]
    assert deltas[1:] == [
        {"reasoning_content": "Hm", "reasoning": "Hm"},
        {"reasoning_content": ".", "reasoning": "."},
        {"content": "Yes."},
        {},
    ]


async def test_tools_reach_template_and_worker(server: Server, http: httpx.AsyncClient) -> None:
    assert (await post(http, tools=[ADD, NOW], parallel_tool_calls=False)).status_code == 200
    without_strict = {"type": "function", "function": {"name": "now"}}
    assert server.worker.chats[-1]["tools"] == [ADD, without_strict]
    (wishes,) = server.worker.wishes
    assert wishes.tools == (Tool("add", PARAMETERS), Tool("now", {}, strict=True))
    assert (wishes.choice, wishes.named, wishes.parallel) == ("auto", None, False)


@pytest.mark.parametrize(
    ("choice", "mode", "named", "told"),
    [
        ("none", "none", None, None),
        ("required", "required", None, [ADD]),
        ({"type": "function", "function": {"name": "add"}}, "required", "add", [ADD]),
        (None, "auto", None, [ADD]),
    ],
)
async def test_tool_choice(
    server: Server, http: httpx.AsyncClient, choice: Any, mode: str, named: str | None, told: Any
) -> None:
    assert (await post(http, tools=[ADD], tool_choice=choice)).status_code == 200
    (wishes,) = server.worker.wishes
    assert (wishes.choice, wishes.named) == (mode, named)
    assert server.worker.chats[-1]["tools"] == told


SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}, "strict": True}}


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        ({"response_format": SCHEMA}, "json_schema", '{"type": "integer"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["x", "y"]}, "lark", 'start: CHOICE\nCHOICE: "x" | "y"'),
        ({"grammar": 'start: "a"'}, "lark", 'start: "a"'),
    ],
)
async def test_formats(
    server: Server, http: httpx.AsyncClient, path: str, fields: dict[str, Any], kind: str, source: str
) -> None:
    assert (await post(http, path, **fields)).status_code == 200
    grammar = server.worker.submitted[-1].shape.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.source) == (kind, source)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/responses", {"input": "hi"}), ("/v1/messages", {"messages": HELLO, "max_tokens": 9})],
)
async def test_forms_of_our_own_in_other_apis(
    server: Server, http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    for fields, kind in (({"regex": "a+"}, "regex"), ({"choice": ["x"]}, "lark"), ({"grammar": "x"}, "lark")):
        assert (await http.post(path, json={"model": "fake"} | body | fields)).status_code == 200
        grammar = server.worker.submitted[-1].shape.grammar
        assert grammar is not None and grammar.kind == kind
    refused = await http.post(path, json={"model": "fake", "regex": "a", "choice": ["x"]} | body)
    assert "'regex'" in refused.json()["error"]["message"] and refused.status_code == 400


async def test_responses_take_one_form_and_bound_the_thinking(
    server: Server, http: httpx.AsyncClient
) -> None:
    body: Any = {"model": "fake", "input": "hi", "max_reasoning_tokens": 7, "enable_thinking": False}
    body["text"] = {"format": {"type": "json_object"}}
    refused = await http.post("/v1/responses", json=body | {"regex": "a"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "regex")
    assert (await http.post("/v1/responses", json=body)).status_code == 200
    assert server.worker.wishes[-1].max_reasoning_tokens == 7
    assert server.worker.chats[-1]["kwargs"] == {"enable_thinking": False}


async def test_plain_completions_have_no_shape(server: Server, http: httpx.AsyncClient) -> None:
    await post(http, "/v1/completions")
    assert server.worker.wishes == []


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": 0}}, {"enable_thinking": 0}),
        ({}, {}),
    ],
)
async def test_thinking_reaches_the_template(
    server: Server, http: httpx.AsyncClient, fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    assert (await post(http, max_reasoning_tokens=7, **fields)).status_code == 200
    assert server.worker.chats[-1]["kwargs"] == variables
    assert server.worker.wishes[-1].max_reasoning_tokens == 7


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": SCHEMA | {"json_schema": {"name": "a b"}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"choice": []}, "choice"),
        ({"regex": "a" * 5000}, "regex"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": [ADD], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tools": [function("a b")]}, "tools[0].function.name"),
        ({"tools": [ADD, function("f", parameters={"type": "array"})]}, "tools[1].function.parameters"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"max_reasoning_tokens": -1}, "max_reasoning_tokens"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ],
)
async def test_refusals(server: Server, http: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    response = await post(http, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert server.worker.submitted == []


async def test_unsupported_keyword_is_named_with_its_place(http: httpx.AsyncClient) -> None:
    schema = {"properties": {"a": {"uniqueItems": True}}}
    response = await post(
        http, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    )
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("response_format", "unsupported_schema")
    assert "'/properties/a/uniqueItems'" in error["message"]
