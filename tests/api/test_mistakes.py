"""Every mistake in a body is told in the API's words: the field, what is expected, what was given."""

from __future__ import annotations

import re
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter

from emlxd.api.fields import Body
from tests.api.test_properties import CHAT, GONE, VALID, app_with, error_text, mutated, places, post
from tests.fakes import FakeEmbedder

BODIES = VALID | {
    "/v1/messages/count_tokens": {"model": "fake", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses#text": {"model": "fake", "input": "hi", "text": {}},
    "/api/generate#format": VALID["/api/generate"] | {"format": {"type": "object"}, "options": {"stop": "x"}},
    "/tokenize#chat": {"model": "fake", "messages": VALID[CHAT]["messages"]},
}
# One or two of each JSON type, in range and out of it.
WRONG = [
    GONE,
    None,
    True,
    -7,
    2**62,
    2**70,
    1e300,
    "",
    "x" * 70,
    [],
    [7],
    [None],
    {},
    {"type": "x"},
    {"x": 7},
]
PYTHON = re.compile(
    r"instance of|dictionary|\blist\b|tuple|\bvalid |Input|should|validation|None|True|False|\bdict\b|\bstr\b"
    r"|literal|pydantic|https?:|function-|\[type="
)


def classes(base: type) -> set[str]:
    return {name for kind in base.__subclasses__() for name in (kind.__name__, *classes(kind))}


def dotted(place: tuple[Any, ...]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).removeprefix(".")


@pytest.mark.parametrize("route", BODIES)
async def test_no_message_speaks_of_python(route: str) -> None:
    path, valid = route.partition("#")[0], BODIES[route]
    names = re.compile(rf"\b({'|'.join(classes(Body))})\b")
    app = app_with(FakeEmbedder())
    assert (await post(app, path, valid))[0] == 200
    refused = 0
    for place in places(valid):
        for value in WRONG:
            body = mutated(valid, place, value)
            status, answer = await post(app, path, body)
            assert status < 500, (place, value, answer)
            if status == 200:
                continue
            refused += 1
            text = error_text(answer)
            assert not PYTHON.search(text) and not names.search(text), (place, value, text)
            assert text.endswith("."), text
            if named := re.match(r"Invalid type for '(.*)'", text):
                there = dotted(place)
                assert named[1].startswith(there) or there.startswith(named[1]), (place, value, text)
    assert refused > len(places(valid))


def bodies(base: type[Body]) -> list[type[Body]]:
    return [kind for below in base.__subclasses__() for kind in (below, *bodies(below))]


@pytest.mark.parametrize("kind", dict.fromkeys(bodies(Body)), ids=lambda kind: kind.__name__)
def test_null_is_no_mistake_where_a_field_may_be_absent(kind: type[Body]) -> None:
    for name, field in kind.model_fields.items():
        if not field.is_required() and name != "type":
            TypeAdapter(Annotated[field.annotation, name, *field.metadata]).validate_python(None, strict=True)


async def test_ollamas_fields_may_be_null() -> None:
    call = {"function": {"name": "f", "arguments": None}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    nothing = {"model": "fake", "options": None, "stream": False}
    for path, fields in (("/api/chat", {"messages": messages}), ("/api/generate", {"prompt": None})):
        status, answer = await post(app_with(FakeEmbedder()), path, nothing | fields)
        assert status == 200, answer


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        (CHAT, {"tools": ["x"]}, "Invalid type for 'tools[0]': expected an object, but got a string."),
        (CHAT, {"tools": {}}, "Invalid type for 'tools': expected an array, but got an object."),
        (CHAT, {"messages": []}, "Invalid value for 'messages': expected 1 or more items, but got 0."),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]},
            "Invalid type for 'tools[0].function.parameters': expected an object, but got an integer.",
        ),
        (
            CHAT,
            {"tool_choice": True},
            "Invalid value for 'tool_choice': expected 'none', 'auto', 'required' or an object that names a "
            "function, but got true.",
        ),
        (
            CHAT,
            {"response_format": {"type": {}}},
            "Invalid value for 'response_format.type': expected 'text', 'json_object' or 'json_schema', "
            "but got an object.",
        ),
        (
            "/v1/rerank",
            {"documents": [1]},
            "Invalid type for 'documents[0]': expected a string or an object, but got an integer.",
        ),
        (
            "/v1/responses",
            {"input": 1},
            "Invalid type for 'input': expected a string or an array, but got an integer.",
        ),
        ("/v1/responses", {"input": [{}]}, "Missing required parameter: 'input[0].type'."),
        (
            "/v1/messages",
            {"system": [{"type": "image"}]},
            "Invalid value for 'system[0]': type 'image' is not supported, expected 'text'.",
        ),
        (
            "/api/chat",
            {"format": 1},
            "Invalid value for 'format': expected 'json' or an object, the schema of the answer, but got 1.",
        ),
        (
            "/api/chat",
            {"think": "x"},
            "Invalid value for 'think': expected a boolean, 'low', 'medium' or 'high', but got 'x'.",
        ),
        (
            "/api/chat",
            {"options": {"repeat_penalty": 0}},
            "Invalid value for 'options.repeat_penalty': expected at least 0.01, but got 0.",
        ),
    ],
)
async def test_a_mistake_is_told_by_field_expected_and_given(
    path: str, fields: dict[str, Any], told: str
) -> None:
    _, answer = await post(app_with(FakeEmbedder()), path, VALID[path] | fields)
    assert error_text(answer) == told
