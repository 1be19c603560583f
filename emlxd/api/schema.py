"""The request bodies of /v1/chat/completions and /v1/completions, of embeddings, rerank and tokenization."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from emlxd.api.fields import Body, GenerationBody, Items, Refusals, field_error, missing
from emlxd.api.json_values import json_type
from emlxd.api.mistakes import shown
from emlxd.api.shapes import FormatBody, ThinkingBody, ToolSpec
from emlxd.api.tools import ToolsBody

# Names that the template call gives itself; ``chat_template_kwargs`` must not give them again.
TEMPLATE_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
PART_KINDS = ("text", "refusal")  # each has its text under its own name


def _check_part(part: Any, place: int) -> None:
    if not isinstance(part, dict):
        raise _part_error(f"part {place} must be an object, not {json_type(part)}")
    kind = part.get("type")
    if kind not in PART_KINDS:
        raise _part_error(f"part {place} has type {shown(kind)}, but this model reads text only")
    if not isinstance(part.get(kind), str):
        raise _part_error(f"part {place} needs '{kind}', a string")


def _part_error(problem: str) -> PydanticCustomError:
    return PydanticCustomError("part", "{problem}", {"problem": problem})


def _content(value: Any) -> Any:
    """A string, null, or a list of text parts."""
    if isinstance(value, list):
        if not value:
            raise _part_error("at least one part is needed")
        for place, part in enumerate(value):
            _check_part(part, place)
    elif not isinstance(value, str | None):
        raise PydanticCustomError("content_type", "expected a string or an array of parts")
    return value


class TextPart(Body):
    type: Literal["text"]
    text: str


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(Body):
    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Annotated[
        Any, BeforeValidator(_content, json_schema_input_type=str | list[TextPart | RefusalPart] | None)
    ] = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None

    @model_validator(mode="after")
    def _complete(self) -> Message:
        says = self.content is not None
        if self.role == "assistant":
            says = says or bool(self.tool_calls or self.function_call or self.refusal is not None)
        if not says:
            raise missing("content")
        if self.role == "tool" and self.tool_call_id is None:
            raise missing("tool_call_id")
        if self.role == "function" and self.name is None:
            raise missing("name")
        return self

    def for_template(self) -> dict[str, Any]:
        """What the client set, in OpenAI's shape. The template's own wishes are text.chat_template's."""
        message = self.model_dump(exclude_none=True)
        if (thought := message.pop("reasoning", None)) is not None:
            message.setdefault("reasoning_content", thought)
        if self.content is None and self.refusal is not None:
            message["content"] = message.pop("refusal")
        return message

    @property
    def is_prefill(self) -> bool:
        """An answer begun by the client, as the last message: it is to be continued."""
        return self.role == "assistant" and bool(self.content) and not self.tool_calls


class ChatPrompt(ToolsBody[ToolSpec], ThinkingBody):
    """A conversation and how it becomes a prompt."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _no_reserved_names(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if taken := TEMPLATE_NAMES & (value or {}).keys():
            raise PydanticCustomError(
                "reserved", "'{name}' is not for chat_template_kwargs", {"name": min(taken)}
            )
        return value

    @model_validator(mode="after")
    def _continue_or_begin(self) -> ChatPrompt:
        if self.continue_final_message and self.add_generation_prompt:
            raise field_error("continue_final_message", "not together with 'add_generation_prompt'")
        return self

    @property
    def continues(self) -> bool:
        """Whether the last message is to be continued instead of answered."""
        if self.continue_final_message is not None:
            return self.continue_final_message
        return self.messages[-1].is_prefill and self.add_generation_prompt is None

    @property
    def begins(self) -> bool:
        """Whether the prompt ends with the head of a new answer."""
        return not self.continues if self.add_generation_prompt is None else self.add_generation_prompt


OF_VLLM: Refusals = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": ({},),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""What clients of vLLM send that would change the answer."""

CHAT_REFUSED: Refusals = {
    **OF_VLLM,
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": ([], ["text"]),
    "moderation": (),
    "prediction": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class ChatBody(GenerationBody, FormatBody, ChatPrompt):
    refused: ClassVar[Refusals] = CHAT_REFUSED

    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "only allowed when 'logprobs' is true")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def _is_token(value: Any) -> bool:
    return type(value) is int


MOST_PROMPTS = 2048  # of one request, as OpenAI has it


def _prompts(value: Any) -> Any:
    """One prompt or many, as text or token ids, to a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(map(_is_token, value)):
            return [value]
        if all(isinstance(prompt, str) for prompt in value):
            return value
        if all(isinstance(prompt, list) and all(map(_is_token, prompt)) for prompt in value):
            return value
    raise PydanticCustomError(
        "prompt", "expected a string, an array of strings, an array of token ids, or an array of those"
    )


Prompts = Annotated[
    list[Any],
    BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


class CompletionBody(GenerationBody, FormatBody):
    refused: ClassVar[Refusals] = {**OF_VLLM, "suffix": ("",)}

    prompt: Annotated[Prompts, Field(max_length=MOST_PROMPTS)]
    best_of: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != self.answers:
            raise field_error("best_of", "only 'best_of' equal to 'n' is supported")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        return self.prompt

    @property
    def token_limit(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's own tokens get logprobs too."""
        return bool(self.echo) and self.logprobs is not None


class TokenizeTextBody(Body):
    model: str
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(ChatPrompt):
    """Special tokens are the template's affair."""

    refused: ClassVar[Refusals] = {"add_special_tokens": (False,), "chat_template": ()}

    model: str
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str
    tokens: Items[int]


class DocumentBody(Body):
    text: str


def _document(value: Any) -> Any:
    """A string, or an object with a text."""
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        raise PydanticCustomError("document_type", "expected a string or an object")
    return value


Document = Annotated[DocumentBody, BeforeValidator(_document, json_schema_input_type=str | DocumentBody)]


class RerankBody(Body):
    model: str
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[Items[Document], Field(min_length=1, max_length=MOST_PROMPTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    truncate: bool | None = None

    @property
    def texts(self) -> list[str]:
        return [document.text for document in self.documents]


class EmbeddingsBody(Body):
    model: str
    input: Annotated[Prompts, Field(max_length=MOST_PROMPTS)]
    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    prompt_name: str | None = None
    truncate: bool | None = None
