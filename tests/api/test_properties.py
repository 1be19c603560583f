"""What holds for every body: a stream says what its whole twin says, and nothing makes a 5xx."""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quart import Quart

from emlxd.api.app import create_app
from emlxd.config import Settings
from emlxd.core import TextPiece, ToolCallPiece
from emlxd.metrics import Metrics
from tests.fakes import FakeEmbedder, FakeRegistry, FakeWorker

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def make_app(worker: FakeWorker) -> Quart:
    return create_app(FakeRegistry(worker), Settings(), Metrics(device="fake"))


@cache
def shared() -> tuple[Quart, FakeRegistry]:
    """An app takes longer to make than to answer."""
    registry = FakeRegistry()
    return create_app(registry, Settings(), Metrics(device="fake")), registry


def app_with(worker: FakeWorker) -> Quart:
    app, registry = shared()
    registry.worker = worker
    return app


async def post(app: Quart, path: str, body: Any) -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await app.test_client().post(path, data=data, headers={"Content-Type": "application/json"})
    return response.status_code, await response.get_data(as_text=False)


def error_text(answer: bytes) -> str:
    """What an error says, in whichever API's shape."""
    error = json.loads(answer)["error"]
    return str(error if isinstance(error, str) else error["message"])


def data_of(stream: bytes) -> list[Any]:
    """The objects of a stream's events."""
    frames = [frame.split("\n") for frame in stream.decode().split("\n\n")]
    lines = [line for frame in frames for line in frame if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def choices_of(stream: bytes) -> dict[str, Any]:
    """The whole answer that the chunks of ``stream`` add up to, without what only one of them has."""
    assert stream.endswith(b"data: [DONE]\n\n")
    *chunks, last = data_of(stream)
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        one = found.setdefault(choice["index"], {"text": "", "thoughts": "", "calls": [], "logprobs": None})
        assert "reason" not in one, "a choice goes on after its end"
        delta = choice.get("delta", {"content": choice.get("text")})
        one["text"] += delta.get("content") or ""
        one["thoughts"] += delta.get("reasoning_content", "")
        one["logprobs"] = added(one["logprobs"], choice["logprobs"])
        for call in delta.get("tool_calls", []):
            if "id" in call:
                one["calls"].append([call["id"], call["function"]["name"], ""])
            one["calls"][call["index"]][2] += call["function"]["arguments"]
        if choice["finish_reason"] is not None:
            one["reason"] = choice["finish_reason"]
            one["logprobs"] = filled(one["logprobs"])
    return {"choices": found, "usage": last["usage"]}


def filled(logprobs: Any) -> Any:
    """No chunk tells of an answer without tokens."""
    return logprobs if logprobs and any(logprobs.values()) else None


def added(so_far: Any, part: Any) -> Any:
    """Two parts of a choice's logprobs as one."""
    if so_far is None or part is None:
        return so_far or part
    return {name: value and so_far[name] + value for name, value in part.items()}


def choices_of_whole(whole: dict[str, Any]) -> dict[str, Any]:
    return {
        "choices": {one["index"]: choice_of_whole(one) for one in whole["choices"]},
        "usage": whole["usage"],
    }


def choice_of_whole(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message", {"content": choice.get("text")})
    calls = message.get("tool_calls", [])
    return {
        "text": message["content"] or "",
        "thoughts": message.get("reasoning_content", ""),
        "calls": [[one["id"], one["function"]["name"], one["function"]["arguments"]] for one in calls],
        "logprobs": filled(choice["logprobs"]),
        "reason": choice["finish_reason"],
    }


def message_of(stream: bytes) -> dict[str, Any]:
    """The message that the events of ``stream`` add up to."""
    message: dict[str, Any] = {}
    joined: list[str] = []
    for event in data_of(stream):
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                joined = []
            case "content_block_delta":
                kind = event["delta"]["type"]
                joined.append(event["delta"][DELTAS[kind]])
            case "content_block_stop":
                block, said = message["content"][event["index"]], "".join(joined)
                name = "input" if block["type"] == "tool_use" else block["type"]
                block[name] = json.loads(said) if name == "input" else said
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return without_ids(message)


DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def response_of(stream: bytes) -> dict[str, Any]:
    """The last event's response; its items are those that the events before it told of."""
    events = data_of(stream)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response: dict[str, Any] = events[-1]["response"]
    told = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert told == response["output"]
    for place, item in enumerate(told):
        pieces = [e["delta"] for e in events if "delta" in e and e["output_index"] == place]
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(pieces) == said
    return without_ids(response)


def without_ids(value: Any) -> Any:
    """What two answers to one request have in common."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        return {key: without_ids(item) for key, item in value.items() if key not in ("id", "created_at")}
    return value


letters = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
words = st.lists(letters, max_size=8)
argument_texts = st.dictionaries(letters, st.integers() | letters, max_size=2).map(json.dumps)


@st.composite
def calls(draw: st.DrawFn) -> list[ToolCallPiece]:
    """Calls of tools, the arguments in pieces."""
    pieces = []
    for call, text in enumerate(draw(st.lists(argument_texts, min_size=1, max_size=3))):
        cut = draw(st.integers(0, len(text)))
        pieces.append(ToolCallPiece(call, text[:cut], f"call_{call}", "f"))
        pieces.append(ToolCallPiece(call, text[cut:]))
    return pieces


spoken = letters.map(TextPiece)
thoughts = letters.map(lambda text: TextPiece(text, channel="reasoning"))
shaped = st.builds(
    lambda *parts: [piece for part in parts for piece in part],
    st.lists(thoughts, max_size=2),
    st.lists(spoken, max_size=3),
    st.just([]) | calls(),
)
common = st.fixed_dictionaries(
    {"model": st.just("fake")},
    optional={
        "seed": st.none() | st.integers(-(2**63), 2**63 - 1),
        "temperature": st.none() | st.floats(0, 1),
    },
)
stops = st.lists(st.text("abc é", min_size=1, max_size=3), max_size=4)
choices = st.fixed_dictionaries(
    {}, optional={"n": st.integers(1, 3), "max_tokens": st.integers(0, 9), "stop": stops}
)
hello = st.just([{"role": "user", "content": "hi"}])
chat_fields = st.fixed_dictionaries({"messages": hello}, optional={"logprobs": st.just(True)})
text_prompts = st.text("xyz", min_size=1, max_size=5)
text_fields = st.fixed_dictionaries(
    {"prompt": text_prompts | st.lists(text_prompts, min_size=1, max_size=3), "echo": st.booleans()},
    optional={"logprobs": st.integers(0, 5)},
)
message_fields = st.fixed_dictionaries(
    {"messages": hello, "max_tokens": st.integers(1, 9)}, optional={"stop_sequences": stops}
)
response_fields = st.fixed_dictionaries(
    {"input": st.just("hi")},
    optional={"max_output_tokens": st.integers(1, 9), "top_logprobs": st.integers(0, 2)},
)


def merged(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda *found: {key: value for part in found for key, value in part.items()}, *parts)


async def both(path: str, body: Any, worker: FakeWorker) -> tuple[bytes, Any]:
    """The answer streamed and whole."""
    app = app_with(worker)
    status, whole = await post(app, path, body)
    assert status == 200, whole
    options = {"stream_options": {"include_usage": True}} if path in (CHAT, TEXT) else {}
    _, stream = await post(app, path, body | {"stream": True} | options)
    return stream, json.loads(whole)


@settings(max_examples=100, deadline=None)
@given(body=merged(common, choices, text_fields), said=words)
async def test_a_streamed_completion_equals_a_whole_one(body: dict[str, Any], said: list[str]) -> None:
    stream, whole = await both(TEXT, body, FakeWorker(words=said))
    assert choices_of(stream) == choices_of_whole(whole)


@settings(max_examples=100, deadline=None)
@given(body=merged(common, choices, chat_fields), said=words, says=st.just([]) | shaped)
async def test_a_streamed_chat_equals_a_whole_one(
    body: dict[str, Any], said: list[str], says: list[Any]
) -> None:
    stream, whole = await both(CHAT, body, FakeWorker(words=said, says=says))
    assert choices_of(stream) == choices_of_whole(whole)


@settings(max_examples=100, deadline=None)
@given(body=merged(common, message_fields), said=words, says=st.just([]) | shaped)
async def test_a_streamed_message_equals_a_whole_one(
    body: dict[str, Any], said: list[str], says: list[Any]
) -> None:
    stream, whole = await both(MESSAGES, body, FakeWorker(words=said, says=says))
    assert message_of(stream) == without_ids(whole)


@settings(max_examples=100, deadline=None)
@given(body=merged(common, response_fields), said=words, says=st.just([]) | shaped)
async def test_a_streamed_response_equals_a_whole_one(
    body: dict[str, Any], said: list[str], says: list[Any]
) -> None:
    stream, whole = await both(RESPONSES, body, FakeWorker(words=said, says=says))
    assert response_of(stream) == without_ids(whole)


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SPEC = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
SAMPLING: dict[str, Any] = {
    "model": "fake", "temperature": 1, "top_p": 1.0, "top_k": 5, "min_p": 0, "seed": 1, "stream": False,
    "stream_chunks": "word", "logit_bias": {"5": 1.5}, "presence_penalty": 0.5, "frequency_penalty": -1,
    "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": False,
}  # fmt: skip
VALID: dict[str, dict[str, Any]] = {
    CHAT: SAMPLING | {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "1", "tool_call_id": "a"},
        ],
        "n": 2, "stop": ["x"], "max_tokens": 5, "stream_options": None, "logprobs": True, "top_logprobs": 2,
        "response_format": {"type": "text"}, "chat_template_kwargs": {"a": 1}, "metadata": {"a": "b"},
        "tools": [{"type": "function", "function": SPEC}], "tool_choice": "auto", "parallel_tool_calls": True,
    },
    TEXT: SAMPLING | {
        "prompt": ["ab", "c"], "n": 2, "best_of": 2, "stop": "x", "max_tokens": 5, "echo": True,
        "logprobs": 2,
    },
    RESPONSES: SAMPLING | {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "1"},
        ],
        "instructions": "be brief", "max_output_tokens": 5, "store": True, "metadata": {"a": "b"},
        "include": ["message.output_text.logprobs"], "top_logprobs": 1, "tool_choice": "auto",
        "tools": [{"type": "function"} | SPEC], "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"}, "previous_response_id": None,
    },
    MESSAGES: SAMPLING | {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "1"}]},
        ],
        "max_tokens": 5, "system": [{"type": "text", "text": "be brief"}], "stop_sequences": ["x"],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 5},
    },
    "/v1/embeddings": {
        "model": "fake", "input": ["a", "bc"], "dimensions": 2, "encoding_format": "float", "user": "me",
    },
    "/tokenize": {"model": "fake", "prompt": "a", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"model": "fake", "tokens": [1, 2]},
    "/v1/rerank": {
        "model": "fake", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "truncate": True,
    },
    "/api/chat": {
        "model": "fake",
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
            {"role": "tool", "content": "1", "tool_name": "f"},
        ],
        "tools": [{"type": "function", "function": SPEC}], "stream": False, "think": "low", "keep_alive": 5,
        "options": {"temperature": 1, "top_k": 5, "seed": 1, "repeat_penalty": 1.1, "num_predict": 5},
    },
    "/api/generate": {
        "model": "fake", "prompt": "hi", "system": "be brief", "raw": False, "format": "", "stream": False,
    },
    "/api/embed": {"model": "fake", "input": ["a", "bc"], "truncate": True, "dimensions": 2},
    "/api/embeddings": {"model": "fake", "prompt": "a"},
    "/api/show": {"model": "fake"},
}  # fmt: skip
JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 128, 129, 2**31, 2**63, -(2**63), 2**70, 0.5, -0.5, 1e300,
    "", "x", "fake", "text", "function", "image_url", "user", "assistant", "\x00", "\U0001f600", "a" * 3000,
    [], {}, [[]], [None], [""], ["x"], [1], [-1], [300], [[1], ["a"]], [{}] * 50,
    {"type": "text"}, {"type": "text", "text": "x"}, {"type": "json_object"}, {"x": 1}, {"": None},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside ``value``."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    return [path, *(found for key, item in items for found in places(item, (*path, key)))]


def mutated(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """``value`` with ``new`` at ``path``, or without that place if there is no new value."""
    if not path:
        return None if new is GONE else new
    copy = value.copy()
    if len(path) == 1 and new is GONE:
        del copy[path[0]]
    else:
        copy[path[0]] = mutated(value[path[0]], path[1:], new)
    return copy


GONE = object()


async def test_the_bodies_that_are_mutated_are_valid() -> None:
    app = app_with(FakeEmbedder())
    for path, valid in VALID.items():
        assert (await post(app, path, valid))[0] == 200, path


@pytest.mark.parametrize("seed", range(5))
async def test_ten_thousand_mutated_bodies_are_no_server_errors(seed: int) -> None:
    """One to three mistakes in a valid body: an answer, or an error that says something."""
    random, valid = Random(seed), list(VALID.items())
    app = app_with(FakeEmbedder())
    for _ in range(2_000):
        path, body = random.choice(valid)
        for _ in range(random.choice([1, 1, 1, 2, 3])):
            body = mutated(body, random.choice(places(body)), random.choice([GONE, *JUNK]))
            if not isinstance(body, dict):
                break
        status, data = await post(app, path, body)
        assert status == 200 or (400 <= status < 500 and error_text(data)), (path, body, data)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=60))
async def test_no_bytes_are_a_server_error(data: bytes) -> None:
    status, answer = await post(app_with(FakeWorker()), CHAT, data)
    assert 400 <= status < 500 and json.loads(answer)["error"]["message"]


@pytest.mark.parametrize("cut", range(0, 60, 7))
async def test_no_truncated_body_is_a_server_error(cut: int) -> None:
    status, _ = await post(app_with(FakeWorker()), CHAT, json.dumps(VALID[CHAT]).encode()[:cut])
    assert status == 400
