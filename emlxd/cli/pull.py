"""emlxd pull"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from emlxd.cli.options import ConfigOption, ModelArgument, find_model, load_settings

if TYPE_CHECKING:
    from emlxd.config import ModelSettings


def pull(model: ModelArgument = None, config: ConfigOption = None) -> None:
    """Download a model of the configuration, or all of them."""
    from emlxd.sources import locate

    settings = load_settings(config)
    wanted = settings.models if model is None else (find_model(settings, model),)
    fetch_missing(wanted)
    for each in wanted:
        typer.echo(f"{each.name}: {locate(each.source)}")


def fetch_missing(models: Iterable[ModelSettings]) -> None:
    """Fetch what is not on this machine, with a progress bar. Raises SourceError."""
    from emlxd.sources import fetch, locate

    missing = [model for model in models if locate(model.source) is None]
    if not missing:
        return
    from emlxd.cli.progress import progress_bar

    for model in missing:
        typer.echo(f"Fetching {model.name} from {model.source} ...", err=True)
        with progress_bar() as report:
            fetch(model.source, report)
