"""emlxd launchd and emlxd systemd: the same verbs for two service managers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from emlxd.cli.options import ConfigOption, find_config

if TYPE_CHECKING:
    from emlxd.service.definition import Definition


class Manager(Protocol):
    def render(self) -> str: ...
    def install(self) -> str: ...
    def uninstall(self) -> str: ...
    def start(self) -> str: ...
    def stop(self) -> str: ...
    def restart(self) -> str: ...
    def reload(self) -> str: ...
    def status(self) -> str: ...
    def logs(self, lines: int, follow: bool) -> list[str]: ...


def _launchd(definition: Definition) -> Manager:
    from emlxd.service.launchctl import LaunchAgent

    return LaunchAgent(definition)


def _systemd(definition: Definition) -> Manager:
    from emlxd.service.systemd import UserUnit

    return UserUnit(definition)


def _define(config: Path | None) -> Definition:
    """Raises ConfigError: nothing is installed that could not start."""
    from emlxd.config_file import load
    from emlxd.service.definition import define

    path = find_config(config)
    return define(path, load(path))


def _make(name: str, manager_of: Callable[[Definition], Manager], what: str) -> typer.Typer:
    app = typer.Typer(name=name, help=f"Run the daemon as {what}.", no_args_is_help=True)

    @app.command("print")
    def print_(config: ConfigOption = None) -> None:
        """Print the file that install would write."""
        typer.echo(manager_of(_define(config)).render(), nl=False)

    @app.command()
    def install(config: ConfigOption = None) -> None:
        """Start the daemon, now and with each login.

        The configuration is checked first.
        """
        typer.echo(manager_of(_define(config)).install())

    @app.command()
    def uninstall(config: ConfigOption = None) -> None:
        """Stop the daemon and remove the file."""
        typer.echo(manager_of(_define(config)).uninstall())

    @app.command()
    def start(config: ConfigOption = None) -> None:
        """Start the daemon."""
        typer.echo(manager_of(_define(config)).start())

    @app.command()
    def stop(config: ConfigOption = None) -> None:
        """Stop the daemon; running requests finish."""
        typer.echo(manager_of(_define(config)).stop())

    @app.command()
    def restart(config: ConfigOption = None) -> None:
        """Stop the daemon, then start it."""
        typer.echo(manager_of(_define(config)).restart())

    @app.command()
    def reload(config: ConfigOption = None) -> None:
        """Let the daemon read its configuration again."""
        typer.echo(manager_of(_define(config)).reload())

    @app.command()
    def status(config: ConfigOption = None) -> None:
        """Say whether the daemon runs."""
        typer.echo(manager_of(_define(config)).status())

    @app.command()
    def logs(
        config: ConfigOption = None,
        lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last.")] = 100,
        follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as more come.")] = False,
    ) -> None:
        """Show the daemon's log."""
        import os

        command = manager_of(_define(config)).logs(lines, follow)
        os.execvp(command[0], command)

    return app


launchd = _make("launchd", _launchd, "an agent of launchd, on macOS")
systemd = _make("systemd", _systemd, "a unit of systemd for this user, on Linux")
