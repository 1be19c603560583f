"""What a body asks of the shape of an answer: tools, formats, thinking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from emlxd.api.fields import Body, Items, field_error
from emlxd.core import Grammar, Tool
from emlxd.errors import RequestError
from emlxd.text.dialect import Wishes
from emlxd.text.grammar import (
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Body):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        return {"type": "function", "function": self.function.model_dump(exclude_none=True)}


class JsonSchema(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_of_its_type(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("missing_field", "missing", {"field": "json_schema"})
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


def _tool_choice(value: Any) -> Any:
    """A named tool becomes a list with its name, so that no name is taken for a mode."""
    match value:
        case "none" | "auto" | "required" | None:
            return value
        case {"type": "function", "function": {"name": str(name)}}:
            return [name]
        case _:
            raise PydanticCustomError(
                "tool_choice", "expected 'none', 'auto', 'required' or an object that names a function"
            )


def check_tool_choice(names: Sequence[str], choice: str | list[str] | None) -> None:
    """Raises a field's error for two functions of one name, or a ``choice`` that is none of ``names``."""
    if len(set(names)) < len(names):
        raise field_error("tools", "two functions have the same name")
    if not names and choice not in (None, "none", "auto"):
        raise field_error("tool_choice", "only allowed when 'tools' are specified")
    if isinstance(choice, list) and choice[0] not in names:
        raise field_error("tool_choice", f"there is no function '{choice[0]}' in 'tools'")


class ToolsBody(Body):
    """Tools and how they may be called."""

    tools: Annotated[Items[ToolSpec], Field(max_length=512)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | list[str] | None,
        BeforeValidator(_tool_choice, json_schema_input_type=str | dict[str, Any] | None),
    ] = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _known_tools(self) -> ToolsBody:
        check_tool_choice([spec.function.name for spec in self.tools or []], self.tool_choice)
        return self

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """None if the model is not to know of any."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [spec.for_template() for spec in self.tools]


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


def wishes(tools: ToolsBody, format: FormatBody, thinking: ThinkingBody) -> Wishes:
    """Raises RequestError for a schema that cannot be enforced."""
    choice = tools.tool_choice or "auto"
    return Wishes(
        tools=tuple(
            client_tool(
                spec.function.name,
                spec.function.parameters,
                strict=spec.function.strict,
                param=f"tools[{place}].function.parameters",
            )
            for place, spec in enumerate(tools.tools or [])
        ),
        choice="required" if isinstance(choice, list) else choice,
        named=choice[0] if isinstance(choice, list) else None,
        parallel=tools.parallel_tool_calls is not False,
        grammar=format.text_grammar,
        max_reasoning_tokens=thinking.max_reasoning_tokens,
    )


def client_tool(name: str, parameters: dict[str, Any] | None, *, strict: bool | None, param: str) -> Tool:
    """Raises RequestError, which names ``param``, if the arguments are not an object."""
    if (parameters or {}).get("type", "object") != "object":
        raise RequestError(
            f"Invalid schema in '{param}' at '/type': the arguments of a function are an object.", param=param
        )
    return Tool(name, parameters or {}, strict=bool(strict), param=param)
