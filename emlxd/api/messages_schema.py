"""The request bodies of Anthropic's /v1/messages, and their conversation in the words of chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from emlxd.api.conversation import assistant, said, tool_call, tool_result
from emlxd.api.fields import (
    Body,
    Items,
    Refusals,
    SamplingBody,
    Share,
    field_error,
    kind_tag,
    known_kind,
    one_or_several,
    strings,
)
from emlxd.api.json_values import Json
from emlxd.api.shapes import HeldBody
from emlxd.api.tools import Calling, Name, Tools


class TextBlock(Body):
    type: Literal["text"]
    text: str


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


def _block(text: str) -> Json:
    return {"type": "text", "text": text}


TextBlocks = Annotated[
    Items[Annotated[TextBlock, known_kind("text")]],
    one_or_several(_block, str | list[TextBlock]),
]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks | None = None
    is_error: bool | None = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    """Thinking that only Anthropic's servers can read. The model goes on without it."""

    type: Literal["redacted_thinking"]


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")],
    Discriminator(kind_tag),
    known_kind("text", "tool_use", "tool_result", "thinking", "redacted_thinking"),
]


BLOCKS_OF = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}


class Turn(Body):
    role: Literal["user", "assistant"]
    content: Annotated[
        Items[Block],
        Field(min_length=1),
        one_or_several(_block, str | list[Block]),
    ]

    @model_validator(mode="after")
    def _blocks_of_the_role(self) -> Turn:
        for block in self.content:
            if block.type not in BLOCKS_OF[self.role]:
                raise field_error("content", f"a block of type '{block.type}' cannot come from '{self.role}'")
        return self


def _turns(value: Any) -> Any:
    """Without an empty turn of the assistant at the end, which begins no answer."""
    if not isinstance(value, list) or len(value) < 2 or not isinstance(value[-1], dict):
        return value
    role, content = value[-1].get("role"), value[-1].get("content")
    return value[:-1] if role == "assistant" and content in ("", [], [_block("")]) else value


class ToolParam(Body):
    """A function of the client. Anthropic's own tools have other types."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    schema_at: ClassVar[str] = "input_schema"

    @property
    def parameters(self) -> Json:
        return self.input_schema


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _a_tool_has_a_name(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise field_error("name", "required when 'type' is 'tool'")
        return self


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _nothing_to_budget(self) -> Thinking:
        if self.type == "disabled" and self.budget_tokens is not None:
            raise field_error("budget_tokens", "not allowed when 'type' is 'disabled'")
        return self


class MessagesPrompt(Body):
    """What /v1/messages/count_tokens takes, and /v1/messages beside how to answer."""

    refused: ClassVar[Refusals] = {
        "container": (),
        "context_management": (),
        "mcp_servers": ([],),
        "output_config": ({},),
        "output_format": (),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
    }

    model: str
    messages: Annotated[Items[Turn], Field(min_length=1), BeforeValidator(_turns)]
    system: TextBlocks | None = None
    tools: Tools[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None

    @model_validator(mode="after")
    def _choice_of_a_tool(self) -> MessagesPrompt:
        self.calling.check()
        return self

    @property
    def calling(self) -> Calling:
        choice = self.tool_choice or ToolChoice(type="auto")
        return Calling(
            self.tools or [],
            {"any": "required", "tool": "required"}.get(choice.type, choice.type),
            choice.name if choice.type == "tool" else None,
            not choice.disable_parallel_tool_use,
        )

    @property
    def max_reasoning_tokens(self) -> int | None:
        return self.thinking.budget_tokens if self.thinking else None

    @property
    def thinking_variables(self) -> dict[str, Any]:
        """For the template."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}

    @property
    def continues(self) -> bool:
        """Whether the last turn is the beginning of the answer."""
        last = self.messages[-1]
        return last.role == "assistant" and isinstance(last.content[-1], TextBlock)

    def for_template(self) -> list[Json]:
        """The conversation in OpenAI's shape. Neighbouring turns of one role are one turn."""
        messages = [said("system", _texts(self.system))] if self.system else []
        for role, turns in groupby(self.messages, key=lambda turn: turn.role):
            blocks = [block for turn in turns for block in turn.content]
            messages += [_assistant_message(blocks)] if role == "assistant" else _user_messages(blocks)
        return messages


def _stop_sequences(value: Any) -> Any:
    return strings(value)


class MessagesBody(SamplingBody, MessagesPrompt, HeldBody):
    refused: ClassVar[Refusals] = MessagesPrompt.refused

    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Share | None = None
    stop_sequences: Annotated[
        list[str], BeforeValidator(_stop_sequences, json_schema_input_type=list[str] | None)
    ] = Field(default=[])

    @property
    def token_limit(self) -> int:
        return self.max_tokens

    @property
    def stop_strings(self) -> Sequence[str]:
        return self.stop_sequences


def _assistant_message(blocks: Sequence[Block]) -> Json:
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        tool_call(block.id, block.name, orjson.dumps(block.input).decode())
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return assistant(_texts(blocks), thoughts, calls)


def _user_messages(blocks: Sequence[Block]) -> list[Json]:
    """Each tool result is a message of its own, and so is the text between them."""
    messages: list[Json] = []
    for is_text, group in groupby(blocks, key=lambda block: isinstance(block, TextBlock)):
        if is_text:
            messages.append(said("user", _texts(list(group))))
        else:
            messages += [_tool_message(block) for block in group if isinstance(block, ToolResultBlock)]
    return messages


def _tool_message(block: ToolResultBlock) -> Json:
    """Chat templates know no failed calls, so the text says it."""
    texts = _texts(block.content or [])
    return tool_result(block.tool_use_id, ["Error: ", *texts] if block.is_error else texts)


def _texts(blocks: Sequence[Block]) -> list[str]:
    return [block.text for block in blocks if isinstance(block, TextBlock)]
