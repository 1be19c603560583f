"""Reads config.yaml and the environment into ``Settings``, or says everything that is wrong at once."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from ipaddress import ip_address
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource
from pydantic_settings.exceptions import SettingsError

from emlxd.config import ModelSettings, ServerSettings, Settings, Source
from emlxd.config_document import Document, Keys, dotted
from emlxd.errors import ConfigError

PREFIX = "EMLXD_"


def load(path: Path, env: Mapping[str, str] | None = None) -> Settings:
    """The settings of the file at ``path``, with overrides from ``env`` (the process's own if None).

    Models come with ``defaults`` merged in; their relative ``path`` sources start at the file's
    folder. Raises ConfigError that lists every problem of the file and the environment.
    """
    return load_with_places(path, env)[0]


def load_with_places(path: Path | None, env: Mapping[str, str] | None = None) -> tuple[Settings, list[str]]:
    """The same, and where each model begins: ``config.yaml:7``. Without a file it is ``env`` alone."""
    document, folder = Document(path), path.parent if path else Path()
    overrides = _Overrides(os.environ if env is None else env)
    data = _merge(document.values, overrides.values)
    problems = document.problems + overrides.problems

    def report(where: Keys, message: str) -> None:
        if where in document.unreadable:
            return
        variable = overrides.variable(where)
        if variable is None:
            problems.append((document.line(where), f"{dotted(where)}: {message}"))
        else:
            problems.append((0, f"{variable}: {message}"))

    # Settings would take a key such as `_env_file` as an option of its own, so these go first.
    for key in [key for key in data if key not in Settings.model_fields]:
        report((key,), _unknown_key((key,)))
        del data[key]
    _check_names(data.get("models"), report)
    settings = None
    try:
        settings = Settings(**data)
    except ValidationError as invalid:
        for error in invalid.errors(include_url=False):
            report(error["loc"], _explain(error))
    else:
        _check_exposure(settings.server, report)
    if problems or settings is None:
        raise ConfigError(
            [f"{path}:{line}: {text}" if line else text for line, text in sorted(problems, key=_by_line)]
        )
    models = (_anchor(model.with_defaults(settings.defaults), folder) for model in settings.models)
    server = _anchor_server(settings.server, folder)
    places = [f"{path}:{document.line(('models', index))}" for index in range(len(settings.models))]
    return settings.model_copy(update={"models": tuple(models), "server": server}), places


def load_server(path: Path | None, env: Mapping[str, str] | None = None) -> ServerSettings:
    """Where the daemon of the file at ``path`` is, also while something else in the file is wrong.

    Without a file it is where the environment says. Raises ConfigError as ``load`` does if the server's own
    settings cannot be told.
    """
    try:
        return load_with_places(path, env)[0].server
    except ConfigError as mistakes:
        overrides = _Overrides(os.environ if env is None else env)
        try:
            data = _merge(Document(path).values, overrides.values)
            server = ServerSettings.model_validate(data.get("server") or {})
            return _anchor_server(server, path.parent if path else Path())
        except (ConfigError, ValidationError):
            raise mistakes from None


def _anchor_server(server: ServerSettings, folder: Path) -> ServerSettings:
    if server.api_keys_file is None:
        return server
    return server.model_copy(update={"api_keys_file": _absolute(server.api_keys_file, folder)})


class _Overrides:
    """What the environment sets, by variable, and which of its variables are mistakes."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.values: dict[str, Any] = {}
        self.problems: list[tuple[int, str]] = []
        self._variables: dict[str, dict[str, Any]] = {}
        source = EnvSettingsSource(Settings)
        # One variable at a time, whole sections before parts of them, so that a fault has a name.
        for name in sorted(env, key=lambda name: (name.count("__"), name)):
            if not name.upper().startswith(PREFIX) or not env[name]:
                continue
            source.env_vars = {name.lower(): env[name]}
            try:
                found = source()
            except SettingsError:
                self.problems.append(
                    (0, f"{name}: {env[name]!r} is not JSON, expected JSON for a whole section")
                )
                continue
            if found:
                self._variables[name] = found
                self.values = _merge(self.values, found)
            elif meant := _meant_variable(name):
                self.problems.append((0, f"{name}: no such setting{meant}"))

    def variable(self, where: Keys) -> str | None:
        """The variable that sets ``where``, if one does. The last one applied wins."""
        for name, values in reversed(self._variables.items()):
            if _sets(values, where):
                return name
        return None


def _meant_variable(name: str) -> str:
    """What to say of a variable that sets nothing; empty if it does not look like a setting at all."""
    key = name.upper().removeprefix(PREFIX).lower()
    section = next((section for section in Settings.model_fields if key.startswith(f"{section}_")), None)
    if section is not None:
        return f", expected {PREFIX}{section.upper()}__{key[len(section) :].strip('_').upper()}"
    if "__" in key:
        return f", expected {PREFIX}SECTION__KEY" + _did_you_mean(
            key.split("__")[0], list(Settings.model_fields)
        )
    return ""


def _sets(values: Any, where: Keys) -> bool:
    for key in where:
        if not isinstance(values, dict):
            return True
        if key not in values:
            return False
        values = values[key]
    return True


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` laid on ``base``: mappings merge key by key, all else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _check_names(models: Any, report: Callable[[Keys, str], None]) -> None:
    """Every name and alias must stand for one model, or for one with an adapter."""
    seen: dict[str, Keys] = {}
    for where, name in _names(models):
        if name in seen:
            report(where, f"{name!r} is taken by {dotted(seen[name])}, expected each name and alias once")
        seen.setdefault(name, where)


def _check_exposure(server: ServerSettings, report: Callable[[Keys, str], None]) -> None:
    """Who serves other machines asks for keys, or says that it is meant so."""
    guarded = server.api_keys or server.api_keys_file or server.allow_unauthenticated
    if not guarded and not _is_loopback(server.host):
        message = "is open to other machines without any key, expected server.api_keys, server.api_keys_file"
        report(("server", "host"), f"{server.host} {message}, or server.allow_unauthenticated: true")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _names(models: Any) -> Iterator[tuple[Keys, str]]:
    entries = (
        [(i, m) for i, m in enumerate(models) if isinstance(m, dict)] if isinstance(models, list) else []
    )
    for index, model in entries:
        if isinstance(model.get("name"), str):
            yield ("models", index, "name"), model["name"]
    for index, model in entries:
        aliases, adapters = model.get("aliases"), model.get("adapters")
        for position, alias in enumerate(aliases if isinstance(aliases, list) else []):
            if isinstance(alias, str):
                yield ("models", index, "aliases", position), alias
        for position, adapter in enumerate(adapters if isinstance(adapters, list) else []):
            if isinstance(adapter, dict) and isinstance(adapter.get("name"), str):
                where = ("models", index, "adapters", position, "name")
                yield where, f"{model.get('name')}:{adapter['name']}"


def _anchor(model: ModelSettings, folder: Path) -> ModelSettings:
    """The model with its and its adapters' ``path`` sources made absolute."""

    def anchored(source: Source) -> Source:
        if source.path is None:
            return source
        return source.model_copy(update={"path": _absolute(source.path, folder)})

    adapters = [a.model_copy(update={"source": anchored(a.source)}) for a in model.adapters]
    return model.model_copy(update={"source": anchored(model.source), "adapters": tuple(adapters)})


def _absolute(path: Path, folder: Path) -> Path:
    """``~`` is the home, a relative path starts at ``folder``."""
    return folder.absolute() / os.path.expanduser(path)


_EXPECTED = {
    "missing": "the key is missing, expected it here",
    "int_type": "{input} is not a whole number, expected a whole number",
    "int_parsing": "{input} is not a whole number, expected a whole number",
    "int_from_float": "{input} is not a whole number, expected a whole number",
    "float_type": "{input} is not a number, expected a number",
    "float_parsing": "{input} is not a number, expected a number",
    "finite_number": "{input} is not finite, expected a number",
    "bool_type": "{input} is not a switch, expected true or false",
    "bool_parsing": "{input} is not a switch, expected true or false",
    "string_type": "{input} is not text, expected text (in quotes if it looks like a number)",
    "path_type": "{input} is not a path, expected text",
    "tuple_type": "{input} is not a list, expected a list",
    "model_type": "{input} is not a section, expected keys and values",
    "literal_error": "{input} is not known, expected {expected}",
    "greater_than_equal": "{input} is out of range, expected at least {ge}",
    "greater_than": "{input} is out of range, expected more than {gt}",
    "less_than_equal": "{input} is out of range, expected at most {le}",
    "less_than": "{input} is out of range, expected less than {lt}",
    "value_error": "{error}",
}


def _explain(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return _unknown_key(error["loc"])
    template = _EXPECTED.get(error["type"])
    if template is None:
        return error["msg"]
    return template.format(input=_short(error["input"]), **error.get("ctx", {}))


def _short(value: Any) -> str:
    """A value as the file would show it."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    if isinstance(value, dict | list):
        return "a section" if isinstance(value, dict) else "a list"
    text = str(value) if isinstance(value, date) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unknown_key(where: Keys) -> str:
    known = _keys_of(where[:-1])
    meant = _did_you_mean(str(where[-1]), known)
    return f"unknown key{meant}" if meant else f"unknown key, expected one of {', '.join(known)}"


def _keys_of(where: Keys) -> list[str]:
    """The keys that the section at ``where`` may have."""
    kind: Any = Settings
    for key in where:
        kind = get_args(kind)[0] if isinstance(key, int) else kind.model_fields[key].annotation
    return list(kind.model_fields)


def _did_you_mean(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def _by_line(problem: tuple[int, str]) -> int:
    return problem[0]
