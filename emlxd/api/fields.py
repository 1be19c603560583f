"""What all request bodies share: strict fields, one error for each mistake, one way to refuse.

A field may be absent or null; both mean "the default". A field that nobody knows is ignored, since
clients send many; a field that the API knows and emlxd does not do is in its body's table of
refusals, and is refused by name as soon as it asks for something.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Final, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from emlxd.api.body import read_checked
from emlxd.api.mistakes import request_error, shown
from emlxd.core import Chunking
from emlxd.errors import RequestError

# Known field -> the values, besides null, with which it asks for nothing.
Refusals = Mapping[str, tuple[Any, ...]]

T = TypeVar("T")

MOST_MISTAKES = 1000  # that are looked at to tell the first
INT64 = 2**63
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
MOST_STOPS: Final = 64


class Body(BaseModel):
    """A part of a request: JSON types are not converted into one another."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    refused: ClassVar[Refusals] = {}


@dataclass(frozen=True)
class _FailFast:
    """Pydantic's own cannot be hashed, which ``| None`` asks for."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return cast(CoreSchema, {**handler(source), "fail_fast": True})


Items = Annotated[list[T], _FailFast()]
"""A list whose first mistake ends its check: a body has room for millions."""


def kind_tag(value: Any) -> str:
    """For a list of objects told apart by ``type``: the tag of one. Errors leave it out of a field's name."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>"


def known_kind(*kinds: str) -> BeforeValidator:
    """A check that an object's type is one of ``kinds``."""

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise PydanticCustomError("object_type", "expected an object")
        if value.get("type") is None:
            raise missing("type")
        if value["type"] not in kinds:
            expected = " or ".join(f"'{kind}'" for kind in kinds)
            problem = f"type {shown(value['type'])} is not supported, expected {expected}"
            raise PydanticCustomError("kind", "{problem}", {"problem": problem})
        return value

    return BeforeValidator(check)


def missing(field: str) -> PydanticCustomError:
    """For a check of several fields: one that must be there with the others."""
    return PydanticCustomError("missing_field", "missing", {"field": field})


def field_error(field: str, problem: str) -> PydanticCustomError:
    """For a check of several fields: the one at fault and what is wrong with it."""
    return PydanticCustomError("together", "{problem}", {"field": field, "problem": problem})


def one_or_several(wrap: Callable[[str], Any], described: Any) -> BeforeValidator:
    """A check that a value is an array, or a string that ``wrap`` makes an item of one.

    ``described`` is the type that the API's description shows.
    """

    def check(value: Any) -> Any:
        if isinstance(value, str):
            return [wrap(value)]
        if not isinstance(value, list):
            raise PydanticCustomError("items_type", "expected a string or an array")
        return value

    return BeforeValidator(check, json_schema_input_type=described)


def strings(value: Any, *, most: int = MOST_STOPS) -> Any:
    """One string or several, none of them empty. Each is looked for with every token."""
    found = [value] if isinstance(value, str) else value
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(string, str) for string in found):
        raise PydanticCustomError("stop_type", "expected a string or an array of strings")
    if len(found) > most:
        raise PydanticCustomError(
            "stop_count", "expected at most {most} strings, got {n}", {"most": most, "n": len(found)}
        )
    if "" in found:
        raise PydanticCustomError("stop_empty", "a stop string must not be empty")
    return found


def _token_ids(value: Any) -> Any:
    for key in value if isinstance(value, dict) else ():
        if not TOKEN_ID.fullmatch(key):
            raise PydanticCustomError("token_id", "'{key}' is not a token id", {"key": key[:40]})
    return value


Temperature = Annotated[float, Field(ge=0, le=2)]
Share = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[int, Field(ge=-1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=10)]
Seed = Annotated[int, Field(ge=-INT64, lt=INT64)]


class SamplingBody(Body):
    """The fields of every route that generates text, whichever API it belongs to.

    What the APIs name differently each adds under its own name, and tells in one way by these properties.
    """

    model: str
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_token_ids)] | None
    ) = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    seed: Seed | None = None
    stream: bool | None = None
    stream_chunks: Chunking | None = None

    @property
    def token_limit(self) -> int | None:
        """How many tokens an answer may have, None for all that fit."""
        return None

    @property
    def stop_strings(self) -> Sequence[str]:
        return ()

    @property
    def answers(self) -> int:
        """How many answers a prompt gets."""
        return 1

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens go with each token's logprob, None for no logprobs."""
        return None


class StreamOptions(Body):
    include_usage: bool | None = None


def _at_most_four(value: Any) -> Any:
    return strings(value, most=4)


class GenerationBody(SamplingBody):
    """What OpenAI's chat completions and completions have in common."""

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: Annotated[
        list[str], BeforeValidator(_at_most_four, json_schema_input_type=str | list[str] | None)
    ] = []
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "only allowed when 'stream' is true")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def stop_strings(self) -> Sequence[str]:
        return self.stop

    @property
    def answers(self) -> int:
        return self.n or 1


B = TypeVar("B", bound=Body)


async def read_body(kind: type[B], max_bytes: int) -> B:
    """The request's body as a ``kind``. Raises what ``body.read_checked`` and ``validate`` raise."""
    return await read_checked(partial(validate, kind), max_bytes)


def validate(kind: type[B], data: Mapping[str, Any]) -> B:
    """``data`` as a ``kind``. Raises RequestError that names the first field at fault."""
    _refuse(data, kind.refused)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        if (count := error.error_count()) > MOST_MISTAKES:
            raise RequestError(f"The request body has {count} mistakes.", code="invalid_value") from None
        raise request_error(error.errors(include_url=False)[0]) from None


def _refuse(data: Mapping[str, Any], refused: Refusals) -> None:
    if name := refused_field(data, refused):
        raise RequestError(
            f"The parameter '{name}' is not supported by this server.",
            param=name,
            code="unsupported_parameter",
        )


def refused_field(data: Mapping[str, Any], refused: Refusals) -> str | None:
    """The first of ``refused`` with which ``data`` asks for something."""
    for name, neutral in refused.items():
        value = data.get(name)
        if value is not None and not any(_same(value, nothing) for nothing in neutral):
            return name
    return None


def _same(value: Any, nothing: Any) -> bool:
    if isinstance(value, dict):
        value = {key: inner for key, inner in value.items() if inner is not None}
    # In Python False == 0, in JSON it is not.
    return bool(value == nothing) and isinstance(value, bool) == isinstance(nothing, bool)
