"""emlxd check"""

from __future__ import annotations

import typer

from emlxd.cli.options import ConfigOption, find_config


def check(config: ConfigOption = None) -> None:
    """Say what is wrong with the configuration, by line. Status 1 if something is."""
    from emlxd.config_file import load

    path = find_config(config)
    count = len(load(path).models)
    typer.echo(f"{path} is in order: {count} model{'' if count == 1 else 's'}.")
