"""What several commands take: which configuration, which model, which daemon."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from emlxd.errors import ConfigError, UserError

if TYPE_CHECKING:
    from emlxd.cli.client import Client
    from emlxd.config import ModelSettings, ServerSettings, Settings

SEARCHED: Final = ("config.yaml", "config/config.yaml", "~/.config/emlxd/config.yaml")

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        envvar="EMLXD_CONFIG",
        show_default=False,
        help=f"The configuration file; without it the first of {', '.join(SEARCHED)}.",
    ),
]


def complete_model(incomplete: str) -> list[str]:
    """For the shell: the names in the configuration that is found without --config."""
    try:
        settings = load_settings(None)
    except UserError:
        return []
    names = [name for model in settings.models for name in _names(model)]
    return [name for name in names if name.startswith(incomplete)]


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", show_default=False, autocompletion=complete_model, help="A model's name or alias."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
UrlOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL", show_default=False, help="The server; without it the address in the configuration."
    ),
]


def find_config(given: Path | None) -> Path:
    """``given``, or the first file there is. Raises UserError that lists the places."""
    if given is not None:
        return given
    if (found := _first_config()) is None:
        raise UserError(
            f"No configuration file: looked for {', '.join(map(str, _places()))}. "
            "Name one with --config or EMLXD_CONFIG."
        )
    return found


def _first_config() -> Path | None:
    return next((place for place in _places() if place.is_file()), None)


def _places() -> list[Path]:
    return [Path(place).expanduser() for place in SEARCHED]


def load_settings(given: Path | None) -> Settings:
    """Raises ConfigError with every problem, UserError if there is no file."""
    from emlxd.config_file import load

    return load(find_config(given))


def _names(model: ModelSettings) -> tuple[str, ...]:
    return (model.name, *model.aliases, *model.adapter_names)


def find_model(settings: Settings, name: str) -> ModelSettings:
    """The model with this name or alias. Raises UserError that lists the names."""
    for model in settings.models:
        if name in _names(model):
            return model
    names = ", ".join(model.name for model in settings.models) or "none"
    raise UserError(f"No model is called '{name}'. The configuration has: {names}.")


def client_key(settings: ServerSettings) -> str | None:
    """A key that the daemon knows, from ``EMLXD_API_KEY`` or the configuration. Raises UserError."""
    from emlxd.keys import read_keys

    keys = read_keys(settings)
    return os.environ.get("EMLXD_API_KEY") or (keys[0].decode() if keys else None)


def daemon_client(config: Path | None, url: str | None, key: str | None = None) -> Client:
    """A client of the server at ``url``, or of the daemon with that configuration. Raises UserError.

    Without a ``key`` it is that of ``EMLXD_API_KEY``; a daemon's own is in its configuration, too.
    """
    from emlxd.cli.client import Client

    if url is not None:
        return Client(url, key or os.environ.get("EMLXD_API_KEY"))
    server = _server_settings(config)
    return Client(server_url(server), key or client_key(server))


def _server_settings(config: Path | None) -> ServerSettings:
    """Those of the configuration; of the environment alone if there is none. Raises UserError."""
    from emlxd.config_file import load_server

    try:
        return load_server(config or _first_config())
    except ConfigError as error:
        raise ConfigError([*error.problems, "A daemon that runs all the same is found with --url."]) from None


def server_url(settings: ServerSettings) -> str:
    """Where a client on this machine reaches the daemon."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"
