"""What a body asks of the shape of an answer: tools, formats, thinking."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, model_validator

from emlxd.api.fields import Body, Items, field_error, missing
from emlxd.api.json_values import Json
from emlxd.api.tools import Calling, Name
from emlxd.core import Grammar
from emlxd.text.dialect import Wishes
from emlxd.text.grammar import (
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)


class Function(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Body):
    type: Literal["function"]
    function: Function

    schema_at: ClassVar[str] = "function.parameters"

    @property
    def name(self) -> str:
        return self.function.name

    @property
    def description(self) -> str | None:
        return self.function.description

    @property
    def parameters(self) -> Json | None:
        return self.function.parameters

    @property
    def strict(self) -> bool | None:
        return self.function.strict


FormatName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class JsonSchema(Body):
    name: FormatName
    description: str | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_of_its_type(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise missing("json_schema")
        return self

    @property
    def grammar(self) -> Grammar | None:
        if self.type == "json_object":
            return json_object_grammar("response_format")
        if self.type == "json_schema" and self.json_schema:
            schema = {} if self.json_schema.schema_ is None else self.json_schema.schema_
            return json_schema_grammar(schema, "response_format")
        return None


class HeldBody(Body):
    """Ways of emlxd's own to hold an answer's text to a form; at most one, and none beside the API's own."""

    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _one_format(self) -> HeldBody:
        names = self.asked_formats
        if len(names) > 1:
            raise field_error(names[1], f"not together with '{names[0]}'")
        return self

    @property
    def asked_formats(self) -> list[str]:
        """The fields that ask for a form."""
        return [name for name in ("regex", "choice", "grammar") if getattr(self, name) is not None]

    @property
    def text_grammar(self) -> Grammar | None:
        """Raises RequestError for one that cannot be enforced."""
        if self.regex is not None:
            return regex_grammar(self.regex, "regex")
        if self.choice is not None:
            return choice_grammar(self.choice, "choice")
        return None if self.grammar is None else lark_grammar(self.grammar, "grammar")


class FormatBody(HeldBody):
    """``HeldBody`` with OpenAI's own way, ``response_format``."""

    response_format: ResponseFormat | None = None

    @property
    def asked_formats(self) -> list[str]:
        asked = self.response_format is not None and self.response_format.type != "text"
        return [*(["response_format"] if asked else []), *super().asked_formats]

    @property
    def text_grammar(self) -> Grammar | None:
        return super().text_grammar or (self.response_format.grammar if self.response_format else None)


class ThinkingBody(Body):
    """How much is thought before the answer. What the model makes of it is up to its template."""

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    enable_thinking: bool | None = None
    max_reasoning_tokens: Annotated[int, Field(ge=0)] | None = None

    @property
    def thinking_variables(self) -> dict[str, Any]:
        """For the template."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            variables["enable_thinking"] = self.reasoning_effort != "none"
            if self.reasoning_effort != "none":
                variables["reasoning_effort"] = self.reasoning_effort
        if self.enable_thinking is not None:
            variables["enable_thinking"] = self.enable_thinking
        return variables


class ShapingBody(Protocol):
    """What says which shape an answer is to have, in whatever words."""

    @property
    def calling(self) -> Calling: ...
    @property
    def text_grammar(self) -> Grammar | None: ...
    @property
    def max_reasoning_tokens(self) -> int | None: ...


def wishes(body: ShapingBody) -> Wishes:
    """Raises RequestError for a schema that cannot be enforced."""
    return replace(
        body.calling.wishes, grammar=body.text_grammar, max_reasoning_tokens=body.max_reasoning_tokens
    )
