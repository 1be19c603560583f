"""What a request says of tools, whichever API's words it uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Generic, Literal, Protocol, TypeVar, cast

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from emlxd.api.conversation import tool_spec
from emlxd.api.fields import Body, Items, field_error
from emlxd.api.json_values import Json
from emlxd.core import Tool
from emlxd.errors import RequestError
from emlxd.text.dialect import Wishes

MOST_TOOLS: Final = 512

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class ClientTool(Protocol):
    """A function of the client. ``schema_at`` is where its API has the schema of its arguments."""

    schema_at: ClassVar[str]

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str | None: ...
    @property
    def parameters(self) -> Json | None: ...
    @property
    def strict(self) -> bool | None: ...


@dataclass(frozen=True, slots=True)
class Calling:
    """Tools and how they may be called: ``choice`` and ``named`` as ``Wishes`` has them."""

    tools: Sequence[ClientTool]
    choice: str = "auto"
    named: str | None = None
    parallel: bool = True

    def check(self) -> None:
        """Raises a field's error for two tools of one name, and for a choice that none of them is."""
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise field_error("tools", "two tools have the same name")
        if not names and self.choice == "required":
            raise field_error("tool_choice", "only allowed when 'tools' are specified")
        if self.named is not None and self.named not in names:
            raise field_error("tool_choice", f"there is no tool '{self.named}' in 'tools'")

    @property
    def for_template(self) -> list[Json] | None:
        """None if the model is not to know of any."""
        if not self.tools or self.choice == "none":
            return None
        return [tool_spec(tool.name, tool.description, tool.parameters) for tool in self.tools]

    @property
    def wishes(self) -> Wishes:
        """Raises RequestError for a tool whose arguments are not an object."""
        tools = tuple(
            _tool(tool, f"tools[{place}].{tool.schema_at}") for place, tool in enumerate(self.tools)
        )
        return Wishes(tools=tools, choice=self.choice, named=self.named, parallel=self.parallel)


def _tool(tool: ClientTool, param: str) -> Tool:
    parameters = tool.parameters or {}
    if parameters.get("type", "object") != "object":
        raise RequestError(
            f"Invalid schema in '{param}' at '/type': the arguments of a function are an object.", param=param
        )
    return Tool(tool.name, parameters, strict=bool(tool.strict), param=param)


def _tool_choice(value: Any) -> Any:
    """A named tool becomes a list with its name, so that no name is taken for a mode."""
    match value:
        case "none" | "auto" | "required" | None:
            return value
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return [name]
        case _:
            raise PydanticCustomError(
                "tool_choice", "expected 'none', 'auto', 'required' or an object that names a function"
            )


T = TypeVar("T")  # a ClientTool, but pydantic knows no protocols


Tools = Annotated[Items[T], Field(max_length=MOST_TOOLS)]


class ToolsBody(Body, Generic[T]):
    """Tools and how they may be called, as OpenAI's APIs say it."""

    tools: Tools[T] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | list[str] | None,
        BeforeValidator(_tool_choice, json_schema_input_type=str | dict[str, Any] | None),
    ] = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _known_tools(self) -> ToolsBody[T]:
        self.calling.check()
        return self

    @property
    def calling(self) -> Calling:
        tools = cast("Sequence[ClientTool]", self.tools or [])
        parallel = self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, list):
            return Calling(tools, "required", self.tool_choice[0], parallel)
        return Calling(tools, self.tool_choice or "auto", None, parallel)
