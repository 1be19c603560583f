"""The request body of /v1/responses, and its items in the words of chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter, model_validator

from emlxd.api.conversation import assistant, said, tool_call, tool_result
from emlxd.api.fields import (
    Body,
    Items,
    Refusals,
    SamplingBody,
    kind_tag,
    known_kind,
    missing,
    one_or_several,
)
from emlxd.api.json_values import Json
from emlxd.api.shapes import FormatName, HeldBody, ThinkingBody
from emlxd.api.tools import Name, ToolsBody
from emlxd.core import Grammar
from emlxd.text.grammar import json_object_grammar, json_schema_grammar

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


def _part(text: str) -> Json:
    return {"type": "input_text", "text": text}


Part = Annotated[
    Annotated[TextPart, Tag("<input_text>")]
    | Annotated[TextPart, Tag("<output_text>")]
    | Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(kind_tag),
    known_kind("input_text", "output_text", "text", "refusal"),
]
Parts = Annotated[Items[Part], one_or_several(_part, str | list[Part])]


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


def _item(text: str) -> Json:
    return {"role": "user", "content": text}


class ToolParam(Body):
    """A function of the client. OpenAI's own tools have other types."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    schema_at: ClassVar[str] = "parameters"


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: FormatName | None = None
    description: str | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_of_its_type(self) -> TextFormat:
        if self.type == "json_schema":
            for field, value in (("name", self.name), ("schema", self.schema_)):
                if value is None:
                    raise missing(field)
        return self

    @property
    def grammar(self) -> Grammar | None:
        """Raises RequestError for a schema that cannot be enforced."""
        if self.type == "json_object":
            return json_object_grammar("text.format")
        if self.type == "json_schema":
            return json_schema_grammar(self.schema_, "text.format.schema")
        return None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    """Thoughts are given as they are: a summary of them cannot be had."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None


class ResponsesBody(SamplingBody, ToolsBody[ToolParam], HeldBody):
    refused: ClassVar[Refusals] = {
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
        "service_tier": ("auto", "default"),
        "truncation": ("disabled",),
    }

    input: Annotated[Items[Item], Field(min_length=1), one_or_several(_item, str | list[Item])]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    include: Items[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    enable_thinking: bool | None = None
    max_reasoning_tokens: Annotated[int, Field(ge=0)] | None = None

    @property
    def asked_formats(self) -> list[str]:
        asked = self.text is not None and self.text.format is not None and self.text.format.type != "text"
        return [*(["text.format"] if asked else []), *super().asked_formats]

    @property
    def text_grammar(self) -> Grammar | None:
        format = self.text.format if self.text else None
        return super().text_grammar or (format.grammar if format else None)

    @property
    def thinking_variables(self) -> dict[str, Any]:
        """For the template."""
        effort = self.reasoning.effort if self.reasoning else None
        asked = ThinkingBody(reasoning_effort=effort, enable_thinking=self.enable_thinking)
        return asked.thinking_variables

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
