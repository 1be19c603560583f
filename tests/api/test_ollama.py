"""Ollama's routes through its own Python client, whose types say what the shapes are."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import ollama
import orjson
import pytest

from emlxd.api.exchange import Exchange
from emlxd.api.ollama_render import ChatRenderer
from emlxd.core import Finished, ModelCard, TextPiece, Timing, ToolCallPiece, Usage
from emlxd.errors import ServerFault
from tests.api.conftest import Server, start_server
from tests.fakes import FakeEmbedder, FakeRegistry, fake_card

ASK: Any = {"model": "fake", "messages": [{"role": "user", "content": "Count."}]}
TEXT = "one two three four five six"


@pytest.fixture
async def client(server: Server) -> AsyncIterator[ollama.AsyncClient]:
    client = ollama.AsyncClient(host=server.url, verify=False)
    yield client
    await client.close()


async def test_chat(client: ollama.AsyncClient, server: Server) -> None:
    options = {
        "temperature": 0.5,
        "top_k": 3,
        "repeat_penalty": 1.1,
        "seed": 7,
        "num_predict": 5,
        "num_ctx": 64,
    }
    answer = await client.chat(**ASK, options=options, keep_alive="5m")
    assert (answer.message.role, answer.message.content) == ("assistant", "one two three four five")
    assert (answer.model, answer.done, answer.done_reason) == ("fake", True, "length")
    assert (answer.prompt_eval_count, answer.eval_count) == (len("user:Count.\n"), 5)
    assert (answer.prompt_eval_duration, answer.eval_duration) == (200_000_000, 300_000_000)
    assert answer.total_duration and answer.total_duration >= (answer.load_duration or 0)
    sampling = server.worker.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty, sampling.seed) == (
        0.5,
        3,
        1.1,
        7,
    )


async def test_a_stream_is_the_same_answer_in_parts(client: ollama.AsyncClient) -> None:
    whole = await client.chat(**ASK)
    parts = [part async for part in await client.chat(**ASK, stream=True)]
    assert "".join(part.message.content or "" for part in parts) == whole.message.content == TEXT
    assert [part.done for part in parts] == [False] * 6 + [True]
    assert (parts[-1].done_reason, parts[-1].eval_count) == (whole.done_reason, whole.eval_count)


async def test_it_streams_unless_told_not_to(http: httpx.AsyncClient) -> None:
    answer = await http.post("/api/chat", json=ASK)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [orjson.loads(line)["done"] for line in answer.text.splitlines()] == [False] * 6 + [True]


async def test_curl_need_not_name_the_type(http: httpx.AsyncClient) -> None:
    body, form = orjson.dumps(ASK | {"stream": False}), {"content-type": "application/x-www-form-urlencoded"}
    assert (await http.post("/api/chat", content=body, headers=form)).status_code == 200
    page = form | {"origin": "https://elsewhere.example.com"}
    assert (await http.post("/api/chat", content=body, headers=page)).status_code == 415
    assert (await http.post("/v1/chat/completions", content=body, headers=form)).status_code == 415


async def test_generate(client: ollama.AsyncClient, server: Server) -> None:
    answer = await client.generate("fake", "Count.", system="Be short.", options={"stop": ["four"]})
    assert (answer.response, answer.done_reason) == ("one two three ", "stop")
    assert [message["role"] for message in server.worker.chats[-1]["messages"]] == ["system", "user"]
    parts = [part async for part in await client.generate("fake", "Count.", stream=True)]
    assert "".join(part.response or "" for part in parts) == TEXT


async def test_a_raw_prompt_is_only_gone_on_with(client: ollama.AsyncClient, server: Server) -> None:
    answer = await client.generate("fake", "Once upon", raw=True)
    assert answer.response == TEXT
    assert (server.worker.submitted[-1].prompt, server.worker.chats) == (tuple(b"Once upon"), [])


async def test_without_a_prompt_the_model_is_loaded(client: ollama.AsyncClient, server: Server) -> None:
    assert (await client.generate("fake")).done_reason == "load"
    assert (await client.chat("fake")).done_reason == "load"
    assert server.worker.submitted == []


async def test_a_conversation_with_tools(client: ollama.AsyncClient, server: Server) -> None:
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("add", "add", "now", "add")]
    messages = [
        *ASK["messages"],
        {"role": "assistant", "thinking": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "12:00", "tool_name": "now"},
        {"role": "tool", "content": "2", "tool_name": "add"},
        {"role": "tool", "content": "3", "tool_name": "add"},
        {"role": "tool", "content": "4"},
    ]
    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
    await client.chat("fake", messages, tools=[tool], think=True)
    chat = server.worker.chats[-1]
    said = chat["messages"][1]
    assert said["reasoning_content"] == "Hm."
    assert [json.loads(each["function"]["arguments"]) for each in said["tool_calls"]] == [{"a": 1}] * 4
    first, second, now, last = (each["id"] for each in said["tool_calls"])
    assert [message["tool_call_id"] for message in chat["messages"][2:]] == [now, first, second, last]
    assert chat["tools"][0]["function"]["name"] == "add"
    assert chat["kwargs"]["enable_thinking"] is True


async def test_format_holds_the_answer_to_a_schema(client: ollama.AsyncClient, server: Server) -> None:
    await client.chat(**ASK, format={"type": "object", "properties": {"n": {"type": "integer"}}})
    assert '"n"' in str(server.worker.submitted[-1].shape.grammar)
    await client.chat(**ASK, format="json")
    assert server.worker.submitted[-1].shape.grammar is not None


async def test_more_stop_strings_than_openai_has(client: ollama.AsyncClient) -> None:
    answer = await client.chat(**ASK, options={"stop": ["a", "b", "c", "d", " four"]})
    assert answer.message.content == "one two three"


async def test_models(client: ollama.AsyncClient) -> None:
    listed = (await client.list()).models
    assert [model.model for model in listed] == ["org/fake-1b", "fake"]
    for model in listed:
        assert (model.size, model.digest) == (2_000, "ab" * 32)
        assert model.modified_at == datetime.fromtimestamp(1_700_000_000, UTC)
        assert model.details is not None
        assert (model.details.format, model.details.family) == ("gguf", "fake")
        assert (model.details.parameter_size, model.details.quantization_level) == ("134.52M", "Q4_1")
    (loaded,) = (await client.ps()).models
    assert (loaded.name, loaded.size, loaded.size_vram) == ("org/fake-1b", 3_000, 3_000)
    assert (loaded.digest, loaded.context_length) == ("ab" * 32, 1000)
    assert loaded.expires_at is not None
    assert timedelta(0) < loaded.expires_at - datetime.now(UTC) <= timedelta(seconds=60)
    shown = await client.show("fake:latest")
    assert shown.modelinfo == {
        "general.architecture": "fake",
        "general.parameter_count": 134_515_008,
        "fake.context_length": 1000,
    }
    assert shown.capabilities == ["completion", "tools"]
    assert shown.template == "{{ messages }}"


@pytest.mark.parametrize(
    ("asked", "parent", "adapters"),
    [
        ("fake", "", ["org/fake-1b:sql"]),
        ("fake:latest", "", ["org/fake-1b:sql"]),
        ("org/fake-1b:latest", "", ["org/fake-1b:sql"]),
        ("org/fake-1b:sql:latest", "org/fake-1b", ["org/fake-1b:sql"]),
        ("org/fake-1b:latest", "org/fake-1b", ["org/fake-1b:latest"]),
        ("org/fake-1b", "", ["org/fake-1b:latest"]),
        ("tagged", "", []),
        ("tagged:latest", "", []),
    ],
)
async def test_latest_is_a_name_without_a_tag_unless_one_is_called_so(
    asked: str, parent: str, adapters: list[str]
) -> None:
    registry = FakeRegistry(aliases=("fake", "tagged:latest"), adapters=tuple(adapters))
    async with start_server(registry) as server:
        client = ollama.AsyncClient(host=server.url, verify=False)
        shown = await client.show(asked)
        assert shown.details and shown.details.parent_model == parent
        assert (await client.chat(**ASK | {"model": asked})).model == asked
        with pytest.raises(ollama.ResponseError, match="does not exist"):
            await client.show(f"{asked}:other")
        await client.close()


@pytest.mark.parametrize(
    ("card", "capabilities"),
    [
        (fake_card(thinks=True), ["completion", "tools", "thinking"]),
        (fake_card(template=""), ["completion"]),
        (fake_card(kind="embedding"), ["embedding"]),
        (None, []),
    ],
)
async def test_what_a_model_can_do(card: ModelCard | None, capabilities: list[str]) -> None:
    async with start_server(FakeRegistry(card=card)) as server:
        client = ollama.AsyncClient(host=server.url, verify=False)
        assert (await client.show("fake")).capabilities == capabilities
        assert [model.size for model in (await client.list()).models] == [card.nbytes if card else 0] * 2
        await client.close()


async def test_a_model_with_an_adapter_is_another_model() -> None:
    async with start_server(FakeRegistry(aliases=(), adapters=("org/fake-1b:tuned",))) as server:
        client = ollama.AsyncClient(host=server.url, verify=False)
        own, tuned = (await client.list()).models
        assert own.digest != tuned.digest
        assert tuned.details is not None and tuned.details.parent_model == "org/fake-1b"
        await client.close()


async def test_version(http: httpx.AsyncClient) -> None:
    assert list((await http.get("/api/version")).json()) == ["version"]


async def test_embed() -> None:
    worker = FakeEmbedder()
    async with start_server(FakeRegistry(worker=worker)) as server:
        client = ollama.AsyncClient(host=server.url, verify=False)
        answer = await client.embed("fake", ["ab", "c" * 2000])
        assert [len(vector) for vector in answer.embeddings] == [4, 4]
        assert answer.prompt_eval_count == 2 + worker.info.max_context
        assert len((await client.embed("fake", "ab", dimensions=2)).embeddings[0]) == 2
        first = (await client.embed("fake", "ab")).embeddings[0]
        assert list((await client.embeddings("fake", "ab")).embedding) == list(first)
        with pytest.raises(ollama.ResponseError, match="maximum context length"):
            await client.embed("fake", "c" * 2000, truncate=False)
        await client.close()


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "none"}, 404, "'none' does not exist"),
        ({"options": {"mirostat": 2}}, 400, "options.mirostat"),
        ({"options": {"tfs_z": True}}, 400, "options.tfs_z"),
        ({"options": {"temperature": "hot"}}, 400, "options.temperature"),
        ({"options": {"top_p": 2}}, 400, "top_p"),
        ({"format": "xml"}, 400, "format"),
        ({"format": {"type": "array", "uniqueItems": True}}, 400, "Invalid schema in 'format' at"),
        ({"messages": [{"role": "user", "images": ["x"]}]}, 400, "images"),
        ({"messages": "hi"}, 400, "messages"),
    ],
)
async def test_errors_are_in_ollamas_shape(
    http: httpx.AsyncClient, fields: dict[str, Any], status: int, message: str
) -> None:
    answer = await http.post("/api/chat", json=ASK | fields)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert message in answer.json()["error"]


async def test_a_failure_in_the_middle_reaches_the_client(client: ollama.AsyncClient, server: Server) -> None:
    server.worker.failure, server.worker.fail_after = ServerFault("The step failed."), 2
    said = []
    with pytest.raises(ollama.ResponseError, match="The step failed"):
        async for part in await client.chat(**ASK, stream=True):
            said.append(part.message.content)
    assert said == ["one", " two"]


def test_a_call_is_told_when_it_is_whole() -> None:
    renderer = ChatRenderer(Exchange("POST"), "fake", 0.0)
    events = [
        TextPiece("Hm.", channel="reasoning"),
        TextPiece("So."),
        ToolCallPiece(0, "", id="call_1", name="add"),
        ToolCallPiece(0, '{"a":'),
        ToolCallPiece(0, " 1}"),
        ToolCallPiece(1, '{"b": ', id="call_2", name="add"),
        Finished("length", Usage(1, 2), Timing()),
    ]
    lines = [line["message"] for event in events for line in renderer.event(0, event)]
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    assert lines == [
        {"role": "assistant", "content": "", "thinking": "Hm."},
        {"role": "assistant", "content": "So."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": '{"b": '},
        {"role": "assistant", "content": ""},
    ]
    message = renderer.result()["message"]
    assert (message["thinking"], message["content"], message["tool_calls"]) == ("Hm.", 'So.{"b": ', [call])
