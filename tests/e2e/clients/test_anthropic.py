"""Anthropic's Python client and a real model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest

from tests.api.strict import assert_known_fields
from tests.daemon import Daemon

pytestmark = pytest.mark.model

GREEDY: Any = {
    "model": "smol",
    "max_tokens": 12,
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "extra_body": {"temperature": 0},
}


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=daemon.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_conversation(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**GREEDY, system="Be brief.")
    assert_known_fields(answer)
    (block,) = answer.content
    assert block.type == "text" and block.text and answer.stop_reason == "max_tokens"
    with client.messages.stream(**GREEDY, system="Be brief.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text and final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == answer.usage.output_tokens == 12
    counted = client.messages.count_tokens(model="smol", messages=GREEDY["messages"], system="Be brief.")
    read = (answer.usage.input_tokens, answer.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == sum(read)


def test_a_begun_answer_and_a_stop_sequence(client: anthropic.Anthropic) -> None:
    begun = [*GREEDY["messages"], {"role": "assistant", "content": "One, two, three, four,"}]
    answer = client.messages.create(
        model="smol", max_tokens=12, messages=begun, stop_sequences=[","], extra_body={"temperature": 0}
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", ",")
    (block,) = answer.content
    assert block.type == "text" and "," not in block.text


WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": ["c", "f"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}


def test_conversation_with_a_tool(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    fields: Any = GREEDY | {"tools": [WEATHER], "max_tokens": 200}
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    first = client.messages.create(**fields | {"messages": messages}, tool_choice=choice)
    assert first.stop_reason == "tool_use"
    (call,) = first.content
    assert call.type == "tool_use" and call.name == "get_weather"
    jsonschema.validate(call.input, WEATHER["input_schema"])
    with client.messages.stream(**fields | {"messages": messages}, tool_choice=choice) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use" and streamed.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees, sunny"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**fields | {"messages": messages}, tool_choice={"type": "none"})
    (block,) = second.content
    assert block.type == "text" and block.text


def test_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**GREEDY | {"model": "none"})
    with pytest.raises(anthropic.BadRequestError, match="tokens"):
        client.messages.create(**GREEDY | {"messages": [{"role": "user", "content": "word " * 3000}]})
