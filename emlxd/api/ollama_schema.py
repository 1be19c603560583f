"""The request bodies of Ollama's /api routes, and what they ask for in the words of OpenAI's."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from emlxd.api.conversation import tool_call
from emlxd.api.fields import (
    Body,
    Items,
    Penalty,
    Refusals,
    RepetitionPenalty,
    Seed,
    Share,
    Temperature,
    TopK,
    field_error,
    one_or_several,
    refused_field,
    strings,
)
from emlxd.api.json_values import Json
from emlxd.api.shapes import ToolSpec
from emlxd.core import Grammar
from emlxd.text.grammar import json_object_grammar, json_schema_grammar

NUMBERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}


class Part(Body):
    """A part of a body that has refusals of its own."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        if isinstance(value, dict) and (name := refused_field(value, cls.refused)):
            raise field_error(name, "not supported by this server")
        return value


class OllamaOptions(Part):
    """Sampling.

    How Ollama loads a model (``num_ctx``, ``num_gpu`` and the like) is not read: config.yaml says that here.
    """

    refused: ClassVar[Refusals] = {
        "mirostat": (0,),
        "tfs_z": (1,),
        "typical_p": (1,),
        "repeat_last_n": (-1,),
        "penalize_newline": (True,),
    }

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    num_predict: Annotated[int, Field(ge=-2)] | None = None
    stop: Annotated[list[str], BeforeValidator(strings, json_schema_input_type=str | list[str] | None)] = (
        Field(default=[])
    )

    def as_openai(self) -> Json:
        """Without what is not set: then the model's defaults hold."""
        found = {theirs: getattr(self, ours) for ours, theirs in NUMBERS.items()}
        if self.num_predict is not None and self.num_predict >= 0:  # -1 and -2 are "as many as fit"
            found["max_tokens"] = self.num_predict
        return {name: value for name, value in found.items() if value is not None}


class OllamaBody(Body):
    """What every body has. ``keep_alive`` is not read: what stays in memory is config.yaml's to say."""

    model: str

    @model_validator(mode="before")
    @classmethod
    def _old_name(cls, value: Any) -> Any:
        """``name`` is what ``model`` was called."""
        old = isinstance(value, dict) and value.get("name") is not None and value.get("model") is None
        return value | {"model": value["name"]} if old else value


def _format(value: Any) -> Any:
    if not isinstance(value, dict) and value not in (None, "", "json"):
        raise PydanticCustomError("format", "expected 'json' or an object, the schema of the answer")
    return value


def _think(value: Any) -> Any:
    if not isinstance(value, bool) and value not in (None, "low", "medium", "high"):
        raise PydanticCustomError("think", "expected a boolean, 'low', 'medium' or 'high'")
    return value


class OllamaGeneratingBody(OllamaBody):
    stream: bool | None = None
    options: OllamaOptions | None = None
    format: Annotated[Literal["", "json"] | dict[str, Any] | None, BeforeValidator(_format)] = None
    think: Annotated[bool | Literal["low", "medium", "high"] | None, BeforeValidator(_think)] = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def stop(self) -> list[str]:
        """Any number of them, of which OpenAI's API allows four."""
        return self.options.stop if self.options else []

    @property
    def text_grammar(self) -> Grammar | None:
        """Raises RequestError for a schema that cannot be enforced."""
        if self.format == "json":
            return json_object_grammar("format")
        return json_schema_grammar(self.format, "format") if isinstance(self.format, dict) else None

    def as_openai(self) -> Json:
        """Without what has its own names in errors, or another range: ``stop`` and ``text_grammar``."""
        found = (self.options or OllamaOptions()).as_openai() | {"model": self.model}
        if isinstance(self.think, bool):
            found["enable_thinking"] = self.think
        elif self.think is not None:
            found["reasoning_effort"] = self.think
        return found


class CalledFunction(Body):
    name: str
    arguments: dict[str, Any] | None = None


class Call(Body):
    function: CalledFunction


class OllamaMessage(Part):
    refused: ClassVar[Refusals] = {"images": ([],)}

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Items[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(OllamaGeneratingBody):
    refused: ClassVar[Refusals] = {"logprobs": (False,), "top_logprobs": (0,), "template": ("",)}

    messages: Items[OllamaMessage] | None = None
    tools: Items[ToolSpec] | None = None

    def as_openai(self) -> Json:
        tools = [spec.model_dump(exclude_none=True) for spec in self.tools or []]
        found = super().as_openai() | {"messages": self._conversation()}
        return found | ({"tools": tools} if tools else {})

    def _conversation(self) -> list[Json]:
        """Ollama's calls have no ids: a result is that of the first call of its name, or of the next one."""
        messages: list[Json] = []
        waiting: list[tuple[str, str]] = []  # calls without a result, by name and id
        for place, message in enumerate(self.messages or []):
            said: Json = {"role": message.role, "content": message.content or ""}
            if message.thinking:
                said["reasoning_content"] = message.thinking
            if message.tool_calls:
                ids = [f"call_{place}_{number}" for number in range(len(message.tool_calls))]
                said["tool_calls"] = [
                    tool_call(id, call.function.name, orjson.dumps(call.function.arguments or {}).decode())
                    for id, call in zip(ids, message.tool_calls, strict=True)
                ]
                waiting = [(call.function.name, id) for call, id in zip(message.tool_calls, ids, strict=True)]
            if message.role == "tool":
                answered = next((call for call in waiting if call[0] == message.tool_name), None)
                answered = answered or (waiting or [("", f"call_{place}")])[0]
                waiting = [call for call in waiting if call != answered]
                said["tool_call_id"] = message.tool_call_id or answered[1]
            messages.append(said)
        return messages


class OllamaGenerateBody(OllamaGeneratingBody):
    refused: ClassVar[Refusals] = {
        "context": ([],),
        "images": ([],),
        "logprobs": (False,),
        "suffix": ("",),
        "template": ("",),
        "top_logprobs": (0,),
    }

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None

    @model_validator(mode="after")
    def _raw_is_all(self) -> OllamaGenerateBody:
        if self.raw and self.system:
            raise field_error("system", "not together with 'raw'")
        return self

    def as_openai(self) -> Json:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return super().as_openai() | {"messages": [*system, {"role": "user", "content": self.prompt}]}


class OllamaEmbedBody(OllamaBody):
    input: Annotated[Items[str], one_or_several(str, str | list[str])]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class OllamaEmbeddingsBody(OllamaBody):
    prompt: str
