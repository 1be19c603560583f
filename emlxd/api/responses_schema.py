"""The request body of /v1/responses, and its items in the words of chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter

from emlxd.api.conversation import Json, assistant, said, tool_call, tool_result
from emlxd.api.fields import Body, Refusals, SamplingBody, kind_tag, known_kind

LOGPROBS = "message.output_text.logprobs"


class TextPart(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def _parts(value: Any) -> Any:
    """A string is one part."""
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Part = Annotated[
    Annotated[TextPart, Tag("<input_text>")]
    | Annotated[TextPart, Tag("<output_text>")]
    | Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(kind_tag),
    known_kind("input_text", "output_text", "text", "refusal"),
]
Parts = Annotated[list[Part], BeforeValidator(_parts, json_schema_input_type=str | list[Part])]


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class ReasoningItem(Body):
    """What the model thought. Only its plain text can be shown to it again."""

    type: Literal["reasoning"]
    content: list[Any] | None = None

    @property
    def text(self) -> str:
        parts = [part for part in self.content or [] if isinstance(part, dict)]
        return "".join(str(part.get("text", "")) for part in parts)


def _typed(value: Any) -> Any:
    """A message may leave its type out."""
    return {"type": "message"} | value if isinstance(value, dict) and "role" in value else value


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(kind_tag),
    known_kind("message", "function_call", "function_call_output", "reasoning"),
    BeforeValidator(_typed),
]
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def _items(value: Any) -> Any:
    """A string is one message of the user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesBody(SamplingBody):
    refused: ClassVar[Refusals] = {
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
        "reasoning": ({}, {"effort": "none"}),
        "service_tier": ("auto", "default"),
        "text": ({}, {"format": {"type": "text"}}, {"format": {"type": "text"}, "verbosity": "medium"}),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "truncation": ("disabled",),
    }

    input: Annotated[
        list[Item], Field(min_length=1), BeforeValidator(_items, json_schema_input_type=str | list[Item])
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def likeliest(self) -> int | None:
        asked = self.top_logprobs or LOGPROBS in (self.include or [])
        return (self.top_logprobs or 0) if asked else None


def template_messages(instructions: str | None, items: Sequence[Item]) -> list[Json]:
    """The conversation in the words of chat templates."""
    messages = [said("system", [instructions])] if instructions else []
    for is_assistant, group in groupby(items, key=_is_assistant):
        turn = list(group)
        messages += [_assistant_message(turn)] if is_assistant else map(_other_message, turn)
    return messages


def _is_assistant(item: Item) -> bool:
    return isinstance(item, FunctionCallItem | ReasoningItem) or (
        isinstance(item, MessageItem) and item.role == "assistant"
    )


def _assistant_message(items: Sequence[Item]) -> Json:
    texts = [part.text for item in items if isinstance(item, MessageItem) for part in item.content]
    thoughts = [item.text for item in items if isinstance(item, ReasoningItem)]
    calls = [
        tool_call(item.call_id, item.name, item.arguments)
        for item in items
        if isinstance(item, FunctionCallItem)
    ]
    return assistant(texts, thoughts, calls)


def _other_message(item: Item) -> Json:
    if isinstance(item, FunctionCallOutputItem):
        return tool_result(item.call_id, [part.text for part in item.output])
    assert isinstance(item, MessageItem)
    return said(item.role, [part.text for part in item.content])
