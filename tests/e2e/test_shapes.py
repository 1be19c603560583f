"""The default model, which cannot help but answer in the shape that was asked for."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.daemon import Daemon
from tests.text.schemas import SCHEMAS, Schema

pytestmark = [pytest.mark.model, pytest.mark.timeout(1800)]

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": ["c", "f"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="x", timeout=1800) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, text: str, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    answer = await client.chat.completions.create(model="smol", messages=messages, **fields)
    return answer.choices[0]


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
async def test_every_finished_answer_is_valid(client: openai.AsyncOpenAI, every: int) -> None:
    async def valid(name: str, schema: Schema, temperature: float) -> bool:
        """False if it was cut off."""
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        text = f"Give an example of {name} in JSON."
        choice = await ask(
            client, text, response_format=form, temperature=temperature, max_tokens=120, seed=1
        )
        if choice.finish_reason == "length":
            return False
        jsonschema.validate(json.loads(choice.message.content), schema)
        return True

    asked = [(name, schema, heat) for name, schema in SCHEMAS.items() for heat in (0.0, 1.5)]
    finished = await asyncio.gather(*(valid(*one) for one in asked[::every]))
    assert sum(finished) > len(finished) / 2


@pytest.mark.parametrize("temperature", [0.0, 1.5])
async def test_other_formats(client: openai.AsyncOpenAI, temperature: float) -> None:
    async def said(**form: Any) -> str:
        choice = await ask(client, "Hi", temperature=temperature, max_tokens=50, extra_body=form)
        return str(choice.message.content)

    assert re.fullmatch("[0-9]{3}-[a-f]{2}", await said(regex="[0-9]{3}-[a-f]{2}"))
    assert await said(choice=["yes", "no"]) in ("yes", "no")
    assert re.fullmatch("a[bc]{1,3}d", await said(grammar='start: "a" ("b" | "c"){1,3} "d"'))


async def test_conversation_with_a_tool(client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    fields: Any = {"model": "smol", "tools": [WEATHER], "temperature": 0, "max_tokens": 200}
    first = await client.chat.completions.create(
        messages=messages, tool_choice="required", parallel_tool_calls=False, **fields
    )
    assert first.choices[0].finish_reason == "tool_calls"
    message = first.choices[0].message
    (call,) = message.tool_calls or []
    assert call.type == "function" and call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    messages += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"},
    ]
    second = await client.chat.completions.create(messages=messages, **fields)
    assert second.choices[0].message.content


async def test_streamed_call_is_the_same(client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Weather in Prague?"}]
    fields: Any = {
        "model": "smol", "tools": [WEATHER], "temperature": 0, "max_tokens": 100,
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    }  # fmt: skip
    whole = await client.chat.completions.create(messages=messages, **fields)
    stream = await client.chat.completions.create(messages=messages, stream=True, **fields)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    pieces = [
        call.function.arguments or "" for delta in deltas for call in delta.tool_calls or [] if call.function
    ]
    (call,) = whole.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert "".join(pieces) == call.function.arguments
