"""emlxd status"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emlxd.cli.options import ConfigOption, JsonOption, UrlOption, daemon_client
from emlxd.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import Group
    from rich.table import Table

INTERVAL = 1.0  # seconds between two looks


def status(
    config: ConfigOption = None,
    url: UrlOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on looking until Ctrl-C.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what the running daemon does.

    Its models with slots in use, speed and memory, and what went wrong with them or the last reload.
    """
    client = daemon_client(config, url)
    if as_json:
        typer.echo(json.dumps(client.status(), indent=2))
    elif watch:
        _watch(client.status)
    else:
        from emlxd.cli.table import console

        console().print(render(client.status(), {}))


def _watch(look: Callable[[], Mapping[str, Any]]) -> None:
    from rich.live import Live

    from emlxd.cli.table import console

    speeds = Speeds()
    try:
        with Live(console=console(), auto_refresh=False) as live:
            status = look()
            while True:
                live.update(render(status, speeds.since_last(status, time.monotonic())), refresh=True)
                time.sleep(INTERVAL)
                try:
                    status = look()
                except UserError as error:  # it may come back
                    live.console.print(error.message)
    except KeyboardInterrupt:
        return


class Speeds:
    """Tokens a second of each model between two looks at the status."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._time = 0.0

    def since_last(self, status: Mapping[str, Any], now: float) -> dict[str, float]:
        tokens = {model["name"]: model["tokens"] for model in status["models"] if "tokens" in model}
        seconds = now - self._time
        speeds = {
            name: (count - self._last[name]) / seconds
            for name, count in tokens.items()
            if count >= self._last.get(name, count + 1)
        }
        self._last, self._time = tokens, now
        return speeds


def render(status: Mapping[str, Any], speeds: Mapping[str, float]) -> Group:
    """``speeds`` in tokens a second, of the models for which one is known."""
    from rich.console import Group

    from emlxd.memory import format_bytes

    memory = status["memory"]
    state = "ready" if status["ready"] else "not ready"
    lines = [
        f"{state}, {format_bytes(memory['counted'])} of {format_bytes(memory['budget'])} taken, "
        f"following {status['config']}"
    ]
    return Group(*lines, "", _models(status["models"], speeds), *_remarks(status))


def _models(models: list[dict[str, Any]], speeds: Mapping[str, float]) -> Table:
    from emlxd.cli.table import make_table
    from emlxd.memory import format_bytes

    table = make_table("model", "state", "slots", "waiting", "tokens/s", "memory", right=4)
    for model in models:
        slots = f"{model['running']}/{model['slots']}" if "slots" in model else ""
        speed = f"{speeds[model['name']]:.1f}" if model["name"] in speeds else ""
        size = format_bytes(model["memory"]["total"]) if "memory" in model else ""
        table.add_row(model["name"], model["state"], slots, str(model.get("waiting", "")), speed, size)
    return table


def _remarks(status: Mapping[str, Any]) -> list[str]:
    remarks = [f"{model['name']}: {model['error']}" for model in status["models"] if model["error"]]
    last = status["last_reload"]
    if last and last["error"]:
        when = time.strftime("%H:%M:%S", time.localtime(last["at"]))
        remarks.append(f"The reload at {when} failed, and nothing was changed:\n{last['error']}")
    if status["needs_restart"]:
        remarks.append(f"Changed, but in force only after a restart: {', '.join(status['needs_restart'])}")
    return ["", *remarks] if remarks else []
