"""Writes docs/configuration.md from the settings: ``python -m emlxd.cli.config_page``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, BeforeValidator, SecretStr
from pydantic.fields import FieldInfo

from emlxd.config import ModelDefaults, ModelSettings, Settings
from emlxd.config_values import parse_budget, parse_duration, parse_size
from emlxd.memory import format_bytes

_PAGE: Final = """\
# Configuration

This page is written by `python -m emlxd.cli.config_page`, from the settings themselves.
[config/config.yaml](../config/config.yaml) is a file to start from, with the same settings and defaults.

One YAML file says all. `emlxd` takes the file of `--config` or `EMLXD_CONFIG`, else the first of
`config.yaml`, `config/config.yaml` and `~/.config/emlxd/config.yaml`. An unknown key is a mistake, and every
mistake is told with its line: `emlxd check`. A running daemon follows the file: [reload.md](reload.md).

Sizes are bytes, or `256MB` (powers of 1000), or `1GiB` (powers of 1024). Durations are seconds, or `500ms`,
`15s`, `5m`, `1h30m`.

Settings outside of `models` can come from the environment, with two underscores between the parts:
`EMLXD_SERVER__PORT=9000`. The environment wins over the file. Four more variables are read:

- `EMLXD_CONFIG`: the file.
- `EMLXD_API_KEY`: what commands send to a daemon that has keys.
- `EMLXD_CACHE`: where downloads and compiled code are kept, else `~/.cache/emlxd`.
- `EMLXD_BLAS`: `off`, `pypi`, `system` or the path of a CBLAS library, on Linux CPUs.

{sections}"""

_LIMITS: Final = (
    (Ge, "ge", "{} or more"),
    (Gt, "gt", "more than {}"),
    (Le, "le", "up to {}"),
    (Lt, "lt", "less than {}"),
)


def page() -> str:
    """The whole page."""
    own = [name for name in ModelSettings.model_fields if name not in ModelDefaults.model_fields]
    parts = [
        *(
            _section(f"`{name}`", field.description or "", _rows(field.annotation, f"{name}."))
            for name, field in Settings.model_fields.items()
            if name not in ("defaults", "models")
        ),
        _section(
            "`models`",
            "A list. Each has these, and those of the next section.",
            [row for row in _rows(ModelSettings) if row[0].split(".")[0] in own],
        ),
        _section(
            "`defaults`, and each of `models`",
            "Under `defaults` they hold for every model that does not set its own.",
            list(_rows(ModelDefaults)),
        ),
    ]
    return _PAGE.format(sections="\n".join(parts))


def _section(title: str, text: str, rows: Any) -> str:
    lines = [f"| `{name}` | {default} | {values} | {what} |" for name, default, values, what in rows]
    return "\n".join(
        [f"## {title}", "", text, "", "| setting | default | values | |", "|-|-|-|-|", *lines, ""]
    )


def _rows(model: Any, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Name, default, values and description of every setting, those of inner sections dotted."""
    for name, field in model.model_fields.items():
        inner = _inner(field.annotation)
        if inner is None:
            yield f"{prefix}{name}", _default(field), _values(field), field.description or ""
            continue
        if not isinstance(field.default, BaseModel):  # a section that may be absent, or must be there
            yield f"{prefix}{name}", _default(field), "a section", field.description or ""
        yield from _rows(inner, f"{prefix}{name}.")


def _inner(annotation: Any) -> type[BaseModel] | None:
    """The section that a setting is, if it is one."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.default
    if value in (None, ()):
        return ""
    return f"`{_written(value, field)}`"


def _written(value: Any, field: FieldInfo) -> str:
    """As a person would write it in the file."""
    match _parser(field):
        case "parse_size" if value:
            return format_bytes(value).replace(".0 ", "").replace(" ", "")
        case "parse_duration" if value:
            return f"{value:g}s" if value < 60 else f"{value / 60:g}m"
        case "parse_budget":
            return f"{value:.0%}"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _parser(field: FieldInfo) -> str:
    found = (entry.func for entry in field.metadata if isinstance(entry, BeforeValidator))
    parsers = (parse_size, parse_duration, parse_budget)
    return next((func.__name__ for func in found if func in parsers), "")


def _values(field: FieldInfo) -> str:
    limits = [
        text.format(_written(getattr(entry, name), field))
        for kind, name, text in _LIMITS
        for entry in field.metadata
        if isinstance(entry, kind)
    ]
    kind = {"parse_size": "size", "parse_duration": "duration", "parse_budget": "share or size"}.get(
        _parser(field)
    )
    return ", ".join([kind or _kind(field.annotation), *limits])


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), [one for one in get_args(annotation) if one is not NoneType]
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return "list"
    if origin in (Union, UnionType):
        return _kind(arguments[0])
    if hasattr(annotation, "__metadata__"):
        return _kind(arguments[0])
    names = {
        bool: "`true`, `false`",
        int: "number",
        float: "number",
        str: "text",
        Path: "path",
        SecretStr: "text",
    }
    return names[annotation]


if __name__ == "__main__":
    print(page(), end="")
