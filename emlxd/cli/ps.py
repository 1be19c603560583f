"""emlxd ps"""

from __future__ import annotations

import json

import typer

from emlxd.cli.options import ConfigOption, JsonOption, UrlOption, daemon_client


def ps(config: ConfigOption = None, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List the requests that the running daemon answers now."""
    requests = daemon_client(config, url).requests()
    if as_json:
        typer.echo(json.dumps(requests, indent=2))
        return
    if not requests:
        typer.echo("No request is running.")
        return
    from emlxd.cli.table import console, make_table

    table = make_table("id", "model", "endpoint", "prompt", "answers", "seconds", right=3)
    for request in requests:
        table.add_row(
            request["id"],
            request["model"],
            request["endpoint"],
            str(request["prompt_tokens"]),
            str(request["answers"]),
            f"{request['seconds']:.1f}",
        )
    console().print(table)
