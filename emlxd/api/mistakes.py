"""What pydantic found wrong with a body in the API's words: the field, what is expected, what was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from pydantic_core import ErrorDetails

from emlxd.api.json_values import json_type
from emlxd.errors import RequestError

# By pydantic's kinds of errors: what JSON calls the type that is expected.
_TYPES: Final[Mapping[str, str]] = {
    "bool_type": "a boolean",
    "dict_type": "an object",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "list_type": "an array",
    "model_type": "an object",
    "string_type": "a string",
}

# And where the type is right: what is expected of the value.
_VALUES: Final[Mapping[str, str]] = {
    "finite_number": "a finite number",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "a string that matches {pattern}",
    "string_too_short": "a string of {min_length} or more characters",
    "too_long": "{max_length} or fewer items",
    "too_short": "{min_length} or more items",
}


def request_error(detail: ErrorDetails) -> RequestError:
    context = detail.get("ctx", {})
    param = _path([*detail["loc"], *([context["field"]] if "field" in context else [])])
    kind, given = detail["type"], detail["input"]
    if kind in ("missing", "missing_field"):
        return RequestError(
            f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
        )
    if kind.endswith("_type") or kind in _TYPES:
        expected = _TYPES.get(kind) or detail["msg"].removeprefix("expected ")
        message = f"Invalid type for '{param}': expected {expected}, but got {json_type(given)}."
        return RequestError(message, param=param, code="invalid_type")
    message = f"Invalid value for '{param}': {_problem(detail)}."
    return RequestError(message, param=param, code="invalid_value")


def _problem(detail: ErrorDetails) -> str:
    """Errors of emlxd's own say it themselves, but for what was given."""
    context, given = detail.get("ctx", {}), shown(detail["input"])
    if detail["type"] in _VALUES:
        expected = _VALUES[detail["type"]].format(**{name: _plain(value) for name, value in context.items()})
        return f"expected {expected}, but got {context.get('actual_length', given)}"
    problem = detail["msg"]
    told = " got " in problem or not problem.startswith("expected ")
    return problem if told else f"{problem}, but got {given}"


def _plain(limit: Any) -> Any:
    """2.0 as 2: in JSON they are one number."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit


def shown(value: Any) -> str:
    """A value of a body as JSON writes it: of a long text its beginning, of what has parts only its type."""
    if isinstance(value, dict | list):
        return json_type(value)
    text = f"'{value}'" if isinstance(value, str) else orjson.dumps(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."


def _path(loc: Sequence[int | str]) -> str:
    """``("messages", 0, "content")`` as ``messages[0].content``."""
    named = (step for step in loc if not str(step).startswith("<"))
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in named)
    return path.removeprefix(".")
