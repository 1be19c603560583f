"""What holds for every body: a stream says what its whole twin says, and nothing makes a 5xx."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quart import Quart

from emlxd.api.app import create_app
from emlxd.config import Settings
from emlxd.metrics import Metrics
from tests.fakes import FakeRegistry, FakeWorker

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def make_app(worker: FakeWorker) -> Quart:
    return create_app(FakeRegistry(worker), Settings(), Metrics(device="fake"))


async def post(app: Quart, path: str, body: Any) -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await app.test_client().post(path, data=data, headers={"Content-Type": "application/json"})
    return response.status_code, await response.get_data(as_text=False)


def gather(stream: bytes) -> dict[str, Any]:
    """The whole answer that the chunks of ``stream`` add up to, without what only one of them has."""
    *events, done, end = stream.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events]
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    logprobs: dict[int, Any] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        assert choice["index"] not in reasons, "a choice goes on after its end"
        texts[choice["index"]] = texts.get(choice["index"], "") + text
        logprobs[choice["index"]] = added(logprobs.get(choice["index"]), choice["logprobs"])
        if choice["finish_reason"] is not None:
            reasons[choice["index"]] = choice["finish_reason"]
    return {"texts": texts, "reasons": reasons, "logprobs": logprobs, "usage": last["usage"]}


def added(so_far: Any, part: Any) -> Any:
    """Two parts of a choice's logprobs as one."""
    if so_far is None or part is None:
        return so_far or part
    return {name: value and so_far[name] + value for name, value in part.items()}


def taken_apart(whole: dict[str, Any]) -> dict[str, Any]:
    choices = whole["choices"]
    return {
        "texts": {
            one["index"]: one["message"]["content"] if "message" in one else one["text"] for one in choices
        },
        "reasons": {one["index"]: one["finish_reason"] for one in choices},
        "logprobs": {one["index"]: one["logprobs"] and filled(one["logprobs"]) for one in choices},
        "usage": whole["usage"],
    }


def filled(logprobs: dict[str, Any]) -> dict[str, Any] | None:
    """No chunk tells of an answer without tokens."""
    return logprobs if any(logprobs.values()) else None


words = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), max_size=8)
common = st.fixed_dictionaries(
    {"model": st.just("fake")},
    optional={
        "n": st.integers(1, 3),
        "max_tokens": st.integers(0, 9),
        "stop": st.lists(st.text("abc é", min_size=1, max_size=3), max_size=4),
        "seed": st.none() | st.integers(-(2**63), 2**63 - 1),
        "temperature": st.none() | st.floats(0, 2),
    },
)
text_prompts = st.text("xyz", min_size=1, max_size=5)
chat_fields = st.fixed_dictionaries(
    {"messages": st.just([{"role": "user", "content": "hi"}])},
    optional={"logprobs": st.just(True)},
)
text_fields = st.fixed_dictionaries(
    {"prompt": text_prompts | st.lists(text_prompts, min_size=1, max_size=3), "echo": st.booleans()},
    optional={"logprobs": st.integers(0, 5)},
)
bodies = st.one_of(
    st.builds(lambda body, own: (CHAT, body | own), common, chat_fields),
    st.builds(lambda body, own: (TEXT, body | own), common, text_fields),
)


@settings(max_examples=150, deadline=None)
@given(request=bodies, said=words)
async def test_stream_equals_whole(request: tuple[str, dict[str, Any]], said: list[str]) -> None:
    path, body = request
    app = make_app(FakeWorker(words=said))
    status, whole = await post(app, path, body)
    assert status == 200
    _, stream = await post(app, path, body | {"stream": True, "stream_options": {"include_usage": True}})
    assert gather(stream) == taken_apart(json.loads(whole))


VALID: dict[str, Any] = {
    "model": "fake",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "1", "tool_call_id": "a"},
    ],
    "prompt": ["ab", "c"],
    "temperature": 1,
    "top_p": 1.0,
    "top_k": 5,
    "min_p": 0,
    "n": 2,
    "seed": 1,
    "stop": ["x"],
    "max_tokens": 5,
    "stream": False,
    "stream_options": None,
    "stream_chunks": "word",
    "logit_bias": {},
    "response_format": {"type": "text"},
    "chat_template_kwargs": {"a": 1},
    "echo": True,
}
junk = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8),
        st.sampled_from(["text", "image_url", "function", "user", "tool", -1, 0, 2**63, 1e300, ""]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside ``value``."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    return [path, *(found for key, item in items for found in places(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from([CHAT, TEXT]), place=st.sampled_from(places(VALID)), new=junk)
async def test_no_mutated_body_is_a_server_error(path: str, place: tuple[Any, ...], new: Any) -> None:
    status, data = await post(make_app(FakeWorker()), path, replaced(VALID, place, new))
    if status == 200:
        return
    assert 400 <= status < 500
    error = json.loads(data)["error"]
    assert error["message"] and error.keys() == {"message", "type", "param", "code"}


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=60))
async def test_no_bytes_are_a_server_error(data: bytes) -> None:
    status, answer = await post(make_app(FakeWorker()), CHAT, data)
    assert 400 <= status < 500 and json.loads(answer)["error"]["message"]


@pytest.mark.parametrize("cut", range(0, 60, 7))
async def test_no_truncated_body_is_a_server_error(cut: int) -> None:
    status, _ = await post(make_app(FakeWorker()), CHAT, json.dumps(VALID).encode()[:cut])
    assert status == 400
