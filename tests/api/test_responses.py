"""POST /v1/responses through OpenAI's own client, held to its types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import FunctionTool, Response, ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import TypeAdapter

from emlxd.api.response_store import ResponseStore
from emlxd.api.responses_schema import ITEMS, ResponsesBody
from emlxd.core import TextPiece, Tool, ToolCallPiece
from emlxd.errors import QueueFull, ResponseNotFound, ServerFault
from tests.api.conftest import Server, start_server
from tests.api.strict import assert_known_fields
from tests.api.test_errors import error_of
from tests.api.wire import connect
from tests.daemon_of_fakes import fake_daemon

SAID = "one two three four five six"
PATH = "/v1/responses"
CALL_DONE = "response.function_call_arguments.done"


async def ask(client: openai.AsyncOpenAI, given: Any = "hi", **fields: Any) -> Response:
    answer: Response = await client.responses.create(model="fake", input=given, **fields)
    assert_known_fields(answer)
    Response.model_validate(answer.model_dump(by_alias=True), strict=True)
    return answer


async def events_of(server: Server, **fields: Any) -> list[Any]:
    """The stream's events, their framing, numbers and types checked."""
    async with connect(server.port) as wire:
        await wire.post(PATH, {"model": "fake", "input": "hi", "stream": True} | fields)
        assert (await wire.head())[0] == 200
        *frames, end = (await wire.body()).decode().split("\n\n")
    assert end == ""
    events = []
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        # OpenAI's document requires a name of this one, its client does not know of it.
        known = event if event["type"] != CALL_DONE else {k: v for k, v in event.items() if k != "name"}
        found: Any = TypeAdapter(ResponseStreamEvent).validate_python(known)
        assert_known_fields(found)
        events.append(event)
    return events


async def test_whole_response(client: openai.AsyncOpenAI) -> None:
    answer = await ask(client, metadata={"a": "b"}, instructions="be brief", temperature=0.5)
    assert answer.id.startswith("resp_") and answer.object == "response"
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert (answer.model, answer.output_text) == ("org/fake-1b", SAID)
    assert (answer.metadata, answer.instructions) == ({"a": "b"}, "be brief")
    assert (answer.temperature, answer.top_p, answer.parallel_tool_calls) == (0.5, 0.9, True)
    (item,) = answer.output
    assert item.type == "message" and item.id.startswith("msg_") and item.status == "completed"
    (part,) = item.content
    assert part.type == "output_text" and (part.annotations, part.logprobs) == ([], [])
    usage = answer.usage
    assert usage is not None
    prompt = len("system:be brief\nuser:hi\n")
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (prompt, 6, prompt + 6)
    assert usage.input_tokens_details.cached_tokens == 1
    assert usage.output_tokens_details.reasoning_tokens == 0


async def test_chain_of_events(server: Server, client: openai.AsyncOpenAI) -> None:
    events = await events_of(server)
    names = [event["type"].removeprefix("response.") for event in events]
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 6,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert (events[0]["response"]["status"], events[0]["response"]["output"]) == ("in_progress", [])
    added, part = events[2]["item"], events[3]["part"]
    assert (added["status"], added["content"], part["text"]) == ("in_progress", [], "")
    assert "".join(event.get("delta", "") for event in events) == SAID
    assert {event["item_id"] for event in events if "item_id" in event} == {added["id"]}
    assert events[-4]["text"] == SAID and events[-2]["item"]["content"][0]["text"] == SAID
    whole = await ask(client)
    final = Response.model_validate(events[-1]["response"])
    same = {"status", "usage", "output_text", "incomplete_details", "temperature"}
    assert final.model_dump(include=same) == whole.model_dump(include=same)
    assert final.output_text == SAID


async def test_the_sdk_streams(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model="fake", input="hi") as stream:
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        final = await stream.get_final_response()
    assert text == final.output_text == SAID


@pytest.mark.parametrize("streams", [True, False])
async def test_a_cut_off_response_is_incomplete(
    server: Server, client: openai.AsyncOpenAI, streams: bool
) -> None:
    if streams:
        *_, item, last = await events_of(server, max_output_tokens=2)
        assert (last["type"], item["item"]["status"]) == ("response.incomplete", "incomplete")
        answer = Response.model_validate(last["response"])
    else:
        answer = await ask(client, max_output_tokens=2)
    assert (answer.status, answer.output_text) == ("incomplete", "one two")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


async def test_no_text_is_an_empty_message(server: Server, client: openai.AsyncOpenAI) -> None:
    server.worker.words = []
    assert (await ask(client)).output_text == ""
    names = [event["type"] for event in await events_of(server)]
    assert names.count("response.output_item.added") == names.count("response.output_item.done") == 1


@pytest.mark.parametrize(
    ("failure", "code"), [(ServerFault("broken"), "server_error"), (QueueFull("full"), "rate_limit_exceeded")]
)
async def test_failure_in_mid_stream(server: Server, failure: Any, code: str) -> None:
    server.worker.failure, server.worker.fail_after = failure, 2
    *_, error, failed = await events_of(server)
    assert (error["type"], error["message"]) == ("error", failure.message)
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": code, "message": failure.message}


async def test_logprobs(server: Server, client: openai.AsyncOpenAI) -> None:
    answer = await ask(client, include=["message.output_text.logprobs"], top_logprobs=2)
    (item,) = answer.output
    assert item.type == "message" and item.content[0].type == "output_text"
    entries = item.content[0].logprobs or []
    assert "".join(entry.token for entry in entries) == SAID
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(SAID)
    events = await events_of(server, include=["message.output_text.logprobs"])
    for event in events:
        if event["type"] == "response.output_text.delta":
            assert "".join(entry["token"] for entry in event["logprobs"]) == event["delta"]
    assert len(events[-1]["response"]["output"][0]["content"][0]["logprobs"]) == len(SAID)


async def test_items_reach_the_template(server: Server, client: openai.AsyncOpenAI) -> None:
    """What an assistant thought, said and called is one message; calls and their results are not lost."""
    await ask(
        client,
        [
            {"role": "developer", "content": "be kind"},
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            },
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "wait", "annotations": []}],
            },
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"x":1}'},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "42"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "7"}],
            },
            {"role": "user", "content": "go on"},
        ],
        instructions="be brief",
    )
    calls = [("c1", "f", '{"x":1}'), ("c2", "g", "{}")]
    assert server.worker.chats[-1]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": "wait",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id, name, arguments in calls
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "tool", "tool_call_id": "c2", "content": "7"},
        {"role": "user", "content": "go on"},
    ]


@pytest.mark.parametrize("streams", [True, False])
async def test_a_response_is_kept_and_gone_on_from(
    server: Server, client: openai.AsyncOpenAI, streams: bool
) -> None:
    if streams:
        first = Response.model_validate((await events_of(server, instructions="once"))[-1]["response"])
    else:
        first = await ask(client, instructions="once")
    kept = await client.responses.retrieve(first.id)
    assert kept.model_dump() == first.model_dump()
    second = await ask(client, "more", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    third = await ask(client, "and more", previous_response_id=second.id)
    assert server.worker.chats[-1]["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": SAID},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": SAID},
        {"role": "user", "content": "and more"},
    ]
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    assert (await client.responses.retrieve(third.id)).id == third.id


async def test_what_is_not_kept(server: Server, client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    private = await ask(client, store=False)
    for id in [private.id, "resp_none"]:
        assert error_of(await http.get(f"{PATH}/{id}"), 404)["param"] == "id"
        assert error_of(await http.delete(f"{PATH}/{id}"), 404)
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, previous_response_id=id)
        assert (caught.value.code, caught.value.param) == (
            "previous_response_not_found",
            "previous_response_id",
        )


async def test_what_is_kept_belongs_to_a_key() -> None:
    async with start_server(api_keys=["k-1", "k-2"]) as server:
        plain = openai.DefaultAsyncHttpxClient(verify=False)
        own = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k-1", http_client=plain)
        other = own.with_options(api_key="k-2")
        kept = await ask(own)
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(kept.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.delete(kept.id)
        with pytest.raises(openai.BadRequestError, match="resp_"):
            await ask(other, previous_response_id=kept.id)
        assert (await own.responses.retrieve(kept.id)).id == kept.id
        await ask(own, previous_response_id=kept.id)
        await own.close()


async def test_what_is_kept_outlives_a_reload(tmp_path: Path) -> None:
    async with fake_daemon(tmp_path / "config.yaml", {"m": {}}) as daemon:
        plain = openai.DefaultAsyncHttpxClient(verify=False)
        client = openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="unused", http_client=plain)
        kept = await client.responses.create(model="m", input="hi")
        daemon.write({"m": {}}, server={"heartbeat": 7})
        assert not (await daemon.reloader.reload()).empty
        assert (await client.responses.retrieve(kept.id)).id == kept.id
        await client.close()


PARAMETERS: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "a + b",
    "parameters": PARAMETERS,
    "strict": True,
}
SAYS = (
    TextPiece("Hm", channel="reasoning"),
    TextPiece("Wait."),
    ToolCallPiece(0, "", "call_1", "add"),
    ToolCallPiece(0, '{"a":'),
    ToolCallPiece(0, " 1}"),
    ToolCallPiece(1, "{}", "call_2", "add"),
)


async def test_thoughts_and_calls(server: Server, client: openai.AsyncOpenAI) -> None:
    server.worker.says = SAYS
    answer = await ask(client, tools=[ADD])
    thoughts, message, *calls = answer.output
    assert thoughts.type == "reasoning" and thoughts.id.startswith("rs_") and thoughts.content
    assert (thoughts.summary, thoughts.content[0].text) == ([], "Hm")
    assert message.type == "message" and answer.output_text == "Wait."
    found: Any = calls
    assert [(call.type, call.call_id, call.name, call.arguments, call.status) for call in found] == [
        ("function_call", "call_1", "add", '{"a": 1}', "completed"),
        ("function_call", "call_2", "add", "{}", "completed"),
    ]
    assert answer.tools == [FunctionTool.model_validate(ADD)] and answer.tool_choice == "auto"
    result = {"type": "function_call_output", "call_id": "call_1", "output": "1"}
    await ask(client, [result], previous_response_id=answer.id)
    (_, turn, told) = server.worker.chats[-1]["messages"]
    assert (turn["content"], turn["reasoning_content"], len(turn["tool_calls"])) == ("Wait.", "Hm", 2)
    assert told == {"role": "tool", "tool_call_id": "call_1", "content": "1"}


async def test_thoughts_and_calls_streamed(server: Server, client: openai.AsyncOpenAI) -> None:
    server.worker.says = SAYS
    events = await events_of(server, tools=[ADD])
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[2:-1] == [
        *("output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
    ]
    assert [event["name"] for event in events if event["type"] == CALL_DONE] == ["add", "add"]
    output = events[-1]["response"]["output"]
    assert [event["item"] for event in events if event["type"].endswith("item.done")] == output
    assert [event["output_index"] for event in events if event["type"].endswith("item.done")] == [0, 1, 2, 3]
    assert len({item["id"] for item in output}) == 4
    answer = await ask(client, tools=[ADD])
    for one, other in zip(Response.model_validate(events[-1]["response"]).output, answer.output, strict=True):
        assert one.model_dump(exclude={"id"}) == other.model_dump(exclude={"id"})


@pytest.mark.parametrize(
    ("choice", "wished"),
    [
        (None, ("auto", None)),
        ("none", ("none", None)),
        ("required", ("required", None)),
        ({"type": "function", "name": "add"}, ("required", "add")),
    ],
)
async def test_what_is_asked_of_the_worker(
    server: Server, client: openai.AsyncOpenAI, choice: Any, wished: tuple[str, str | None]
) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string"}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    answer = await ask(
        client,
        tools=[ADD],
        parallel_tool_calls=False,
        reasoning={"effort": "low"},
        text={"format": form},
        **({} if choice is None else {"tool_choice": choice}),
    )
    asked = server.worker.wishes[-1]
    assert (asked.choice, asked.named, asked.parallel) == (*wished, False)
    assert asked.tools == (Tool("add", PARAMETERS, strict=True),)
    assert asked.grammar is not None and asked.grammar.kind == "json_schema"
    chat = server.worker.chats[-1]
    function = {"name": "add", "description": "a + b", "parameters": PARAMETERS}
    assert chat["tools"] == (None if choice == "none" else [{"type": "function", "function": function}])
    assert chat["kwargs"] == {"enable_thinking": True, "reasoning_effort": "low"}
    assert answer.reasoning is not None and answer.reasoning.effort == "low"
    assert answer.text is not None and answer.text.format is not None
    assert answer.text.format.to_dict() == form


def test_the_store_has_bounds() -> None:
    items = ITEMS.validate_python([{"role": "user", "content": "x" * 1000}])
    few = ResponseStore(max_responses=2)
    for number in range(3):
        few.keep(b"", {"id": str(number)}, items)
    with pytest.raises(ResponseNotFound):
        few.get(b"", "0")
    assert few.get(b"", "1").items == few.get(b"", "2").items == items
    small = ResponseStore(max_bytes=2500)
    for number in range(3):
        small.keep(b"", {"id": str(number)}, items)
    with pytest.raises(ResponseNotFound):
        small.get(b"", "0")
    small.delete(b"", "1")
    small.keep(b"", {"id": "3"}, items)
    assert small.get(b"", "2") and small.get(b"", "3")
    small.keep(b"", {"id": "4", "text": "x" * 5000}, items)
    with pytest.raises(ResponseNotFound):
        small.get(b"", "4")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
        ({"input": [{"type": "file_search_call", "id": "a"}]}, "input[0]"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [ADD | {"parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 7}}}},
         "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format.name"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"instructions": 7}, "instructions"),
        ({"input": "x" * 2000}, "input"),
    ],
)  # fmt: skip
async def test_bad_requests(http: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    error = error_of(await http.post(PATH, json={"model": "fake", "input": "hi"} | fields), 400)
    assert error["param"] == param


WITHOUT_EFFECT = {
    "access_programs", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "stream_options", "user",
}  # fmt: skip


def test_every_field_of_openai_has_a_place() -> None:
    fields = set(ResponseCreateParamsBase.__annotations__)
    assert fields - set(ResponsesBody.model_fields) - set(ResponsesBody.refused) == WITHOUT_EFFECT


async def test_fields_that_ask_for_nothing_are_accepted(http: httpx.AsyncClient) -> None:
    body = {"model": "fake", "input": "hi"}
    nothing = {
        "tools": [], "tool_choice": "auto", "reasoning": {"effort": None}, "truncation": "disabled",
        "text": {"format": {"type": "text"}, "verbosity": None}, "background": False, "include": [],
        "service_tier": "auto", "user": "me", "no_such_field": 1,
    }  # fmt: skip
    assert (await http.post(PATH, json=body | nothing)).status_code == 200
    nulls = dict.fromkeys([*ResponsesBody.model_fields, *ResponsesBody.refused])
    assert (await http.post(PATH, json=nulls | body)).status_code == 200
