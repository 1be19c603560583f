"""What all request bodies share: strict fields, one error for each mistake, one table of refusals.

A field may be absent or null; both mean "the default". A field that nobody knows is ignored, since
clients send many; a field that OpenAI's API knows and emlxd does not do is refused by name as soon
as it asks for something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from emlxd.api.body import json_type
from emlxd.core import Chunking
from emlxd.errors import RequestError

# Known field -> the values, besides null, with which it asks for nothing. A row goes when the engine
# learns the field.
NOT_IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_tokens": (0,),
    "modalities": ([], ["text"]),
    "moderation": (),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}

INT64 = 2**63


class Body(BaseModel):
    """A part of a request: JSON types are not converted into one another."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None


def _stop_strings(value: Any) -> Any:
    strings = [value] if isinstance(value, str) else value
    if strings is None:
        return []
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise PydanticCustomError("stop_type", "expected a string or an array of strings")
    if len(strings) > 4:
        raise PydanticCustomError("stop_count", "expected at most 4 strings, got {n}", {"n": len(strings)})
    if "" in strings:
        raise PydanticCustomError("stop_empty", "a stop string must not be empty")
    return strings


class GenerationBody(Body):
    """The fields that every route that generates text has in common."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stop_strings)] = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_chunks: Chunking | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


B = TypeVar("B", bound=GenerationBody)


def validate(kind: type[B], data: Mapping[str, Any]) -> B:
    """``data`` as a ``kind``. Raises RequestError that names the first field at fault."""
    refuse_not_implemented(data)
    try:
        body = kind.model_validate(data)
    except ValidationError as error:
        raise _request_error(error.errors(include_url=False)[0]) from None
    if body.stream_options is not None and not body.stream:
        raise RequestError(
            "The 'stream_options' parameter is only allowed when 'stream' is true.",
            param="stream_options",
            code="invalid_value",
        )
    return body


def refuse_not_implemented(data: Mapping[str, Any]) -> None:
    """Raises RequestError for a known field that asks for something that is not there."""
    for name, neutral in NOT_IMPLEMENTED.items():
        value = data.get(name)
        if value is not None and not any(_same(value, nothing) for nothing in neutral):
            raise RequestError(
                f"The parameter '{name}' is not supported by this server.",
                param=name,
                code="unsupported_parameter",
            )


def _same(value: Any, nothing: Any) -> bool:
    # In Python False == 0, in JSON it is not.
    return bool(value == nothing) and isinstance(value, bool) == isinstance(nothing, bool)


def _request_error(detail: ErrorDetails) -> RequestError:
    context = detail.get("ctx", {})
    param = _path([*detail["loc"], *([context["field"]] if "field" in context else [])])
    kind, got = detail["type"], detail["input"]
    if kind in ("missing", "missing_field"):
        return RequestError(
            f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
        )
    message = detail["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    if kind.endswith("_type"):
        expected = message.removeprefix("expected ")
        return RequestError(
            f"Invalid type for '{param}': expected {expected}, but got {json_type(got)}.",
            param=param,
            code="invalid_type",
        )
    if "Input should be" in detail["msg"]:
        message = f"expected {message}, but got {_short(got)}"
    return RequestError(f"Invalid value for '{param}': {message}.", param=param, code="invalid_value")


def _path(loc: Sequence[int | str]) -> str:
    """``("messages", 0, "content")`` as ``messages[0].content``."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in loc)
    return path.removeprefix(".")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
