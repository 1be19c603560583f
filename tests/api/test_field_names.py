"""Errors that are found behind the API name the field that the client sent."""

from __future__ import annotations

from typing import Any

import pytest

from emlxd.api.messages_schema import MessagesBody
from emlxd.api.responses_schema import ResponsesBody
from emlxd.api.schema import ChatBody
from emlxd.api.shapes import wishes
from emlxd.errors import RequestError
from tests.api.conftest import start_server
from tests.api.test_offload import post
from tests.fakes import FakeRegistry, FakeWorker

SCHEMA: dict[str, Any] = {"type": "object"}
TURN = [{"role": "user", "content": "hi"}]


class Refusing(FakeWorker):
    async def encode_chat(self, *_: Any, **__: Any) -> list[int]:
        raise RequestError("The template refuses.", param="messages")


@pytest.mark.parametrize(
    ("path", "sent", "param"),
    [
        ("/v1/chat/completions", {"messages": TURN}, "messages"),
        ("/v1/responses", {"input": "hi"}, "input"),
    ],
)
async def test_a_conversation_that_the_template_refuses(path: str, sent: dict[str, Any], param: str) -> None:
    async with start_server(FakeRegistry(Refusing())) as server:
        answer = await post(server.url, path, sent)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_tools_schema_has_its_name_in_each_api() -> None:
    function = {"name": "f", "parameters": SCHEMA}
    chat = ChatBody(model="m", messages=TURN, tools=[{"type": "function", "function": function}])  # type: ignore[arg-type]
    responses = ResponsesBody(model="m", input="hi", tools=[{"type": "function", **function}])  # type: ignore[arg-type]
    tool = {"name": "f", "input_schema": SCHEMA}
    messages = MessagesBody(model="m", max_tokens=1, messages=TURN, tools=[tool])  # type: ignore[arg-type]
    found = [wishes(chat), wishes(responses), wishes(messages)]
    assert [wish.tools[0].param for wish in found] == [
        "tools[0].function.parameters",
        "tools[0].parameters",
        "tools[0].input_schema",
    ]


def test_a_format_has_its_name_in_each_api() -> None:
    chat = ChatBody(model="m", messages=TURN, response_format={"type": "json_object"})  # type: ignore[arg-type]
    responses = ResponsesBody(model="m", input="hi", text={"format": {"type": "json_object"}})  # type: ignore[arg-type]
    found = [chat.text_grammar, responses.text_grammar]
    assert [grammar and grammar.param for grammar in found] == ["response_format", "text.format"]
