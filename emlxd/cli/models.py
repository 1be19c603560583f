"""emlxd models"""

from __future__ import annotations

import sys

import typer

from emlxd.cli.options import ConfigOption, load_settings, server_url


def models(config: ConfigOption = None) -> None:
    """List the models of the configuration, their files, and what the daemon says of them."""
    from rich.console import Console
    from rich.table import Table

    from emlxd.cli.client import Client
    from emlxd.sources import locate

    settings = load_settings(config)
    states, remark = Client(server_url(settings.server)).states()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("model", "aliases", "source", "files", "state"):
        table.add_column(title, overflow="fold")
    for model in settings.models:
        table.add_row(
            model.name,
            ", ".join(model.aliases),
            str(model.source),
            "here" if locate(model.source) else "missing",
            states.get(model.name, "-"),
        )
    # Into a pipe or a file every row is one line.
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 1000)
    console.print(table)
    if remark:
        typer.echo(remark, err=True)
