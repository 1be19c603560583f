"""emlxd reload"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from emlxd.cli.options import ConfigOption, UrlOption, daemon_client, find_config
from emlxd.errors import UserError

SAYS = {
    "keep": "stays as it is",
    "retune": "changes while it stays loaded",
    "replace": "is loaded anew",
    "add": "comes",
    "drop": "goes",
    "settings": "changes",
    "needs_restart": "changes with the next restart",
}


def reload(
    config: ConfigOption = None,
    url: UrlOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")
    ] = False,
) -> None:
    """Let the running daemon read its configuration again. Status 1 if it is refused.

    With --url that is the file of the daemon there, whichever it is.
    """
    if url is None:
        print_plan(ask(find_config(config), None, dry_run=dry_run))
    else:
        print_plan(daemon_client(None, url).reload(dry_run=dry_run))


def ask(path: Path, url: str | None, *, dry_run: bool) -> Mapping[str, list[str]]:
    """What the daemon answers, which must run with the file at ``path``. Raises UserError."""
    from emlxd.config_file import load

    load(path)  # what is wrong with it is told without the daemon
    client = daemon_client(path, url)
    running = Path(client.status()["config"])
    if not running.exists() or not running.samefile(path):
        raise UserError(f"The daemon at {client.url} runs with {running}, not with {path}.")
    return client.reload(dry_run=dry_run)


def print_plan(plan: Mapping[str, list[str]]) -> None:
    changes = [(name, SAYS[kind]) for kind, names in plan.items() for name in names if kind != "keep"]
    for name, what in changes:
        typer.echo(f"{name} {what}")
    if not changes:
        typer.echo("Nothing changes: the daemon, which follows the file, runs with it already.")
