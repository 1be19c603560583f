"""emlxd check"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emlxd.cli.options import ConfigOption, UrlOption, find_config
from emlxd.cli.reload import ask, print_plan
from emlxd.errors import SourceError, UserError

if TYPE_CHECKING:
    from emlxd.config import ModelSettings, Settings


def check(
    config: ConfigOption = None,
    against_running: Annotated[
        bool, typer.Option("--against-running", help="Say also what a reload of the daemon would change.")
    ] = False,
    url: UrlOption = None,
) -> None:
    """Say what is wrong with the configuration, by line.

    Then how much memory its models take, if their files are here.
    Status 1 if something is wrong.
    """
    from emlxd.config_file import load_with_places
    from emlxd.keys import read_keys
    from emlxd.sources import locate_model
    from emlxd.tracing import check_tracing

    path = find_config(config)
    settings, found_at = load_with_places(path)
    read_keys(settings.server)
    check_tracing(settings.tracing)
    places = {model.name: place for model, place in zip(settings.models, found_at, strict=True)}
    here = [found for model in settings.models if (found := locate_model(model))]
    missing = [model for model in settings.models if model.name not in [found.name for found, _ in here]]
    lost = [model for model in missing if not _say_missing(model, places[model.name])]
    wrong = [] if url else lost  # a daemon elsewhere has paths of its own
    if here:
        wrong += _print_memory(settings, here, places)
    if not wrong:
        count = len(settings.models)
        typer.echo(f"{path} is in order: {count} model{'' if count == 1 else 's'}.")
    if against_running:
        print_plan(ask(path, url, dry_run=True))
    if wrong:
        raise typer.Exit(1)


def _say_missing(model: ModelSettings, place: str) -> bool:
    """Whether the model's files can be had: paths must be here, downloads need not be yet."""
    from emlxd.sources import check_paths

    try:
        check_paths(model)
    except SourceError as error:
        _say(model, place, error.message)
        return False
    typer.echo(f"{model.name}: the files are not here yet; `emlxd pull` fetches them.", err=True)
    return True


def _say(model: ModelSettings, place: str, problem: str) -> None:
    typer.echo(f"{place}: {model.name}: {problem}", err=True)


def _print_memory(
    settings: Settings, here: list[tuple[ModelSettings, Path]], places: Mapping[str, str]
) -> list[ModelSettings]:
    """Gives the models that cannot be read or are larger than the budget, after saying so."""
    from emlxd.cli.table import console, make_table
    from emlxd.footprint import budget, predict
    from emlxd.memory import format_bytes

    limit = budget(settings.memory)
    table = make_table("model", "weights", "cache", "prefix cache", "working memory", "total", right=5)
    wrong, total = [], 0
    for model, files in here:
        try:
            needs = predict(model, files)
        except UserError as error:
            _say(model, places[model.name], error.message)
            wrong.append(model)
            continue
        parts = (needs.weights, needs.cache, needs.prefix_cache, needs.activations, needs.total)
        table.add_row(model.name, *map(format_bytes, parts))
        for name in model.adapter_names:
            table.add_row(f"  {name}", *[""] * 5)
        total += needs.total
        if needs.total > limit:
            _say(model, places[model.name], "larger than memory.budget alone.")
            wrong.append(model)
    table.add_row("all of them", "", "", "", "", format_bytes(total))
    table.add_row("budget", "", "", "", "", format_bytes(limit))
    console().print(table)
    return wrong
