"""emlxd models"""

from __future__ import annotations

import json
from typing import Any

import typer

from emlxd.cli.options import ConfigOption, JsonOption, UrlOption, daemon_client, load_settings


def models(config: ConfigOption = None, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List the models, their files and their state.

    The models are those of the configuration; their state is the running daemon's.
    """
    from emlxd.cli.table import console, make_table
    from emlxd.sources import locate_model

    settings = load_settings(config)
    states, remark = daemon_client(config, url).states()
    rows: list[dict[str, Any]] = [
        {
            "model": model.name,
            "aliases": list(model.aliases),
            "adapters": list(model.adapter_names),
            "source": str(model.source),
            "files": "here" if locate_model(model) else "missing",
            "state": states.get(model.name),
        }
        for model in settings.models
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        table = make_table("model", "aliases", "source", "files", "state")
        for row in rows:
            table.add_row(
                row["model"], ", ".join(row["aliases"]), row["source"], row["files"], row["state"] or "-"
            )
            for name in row["adapters"]:
                table.add_row(f"  {name}", "", "", "", "")
        console().print(table)
    if remark:
        typer.echo(remark, err=True)
