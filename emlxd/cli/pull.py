"""emlxd pull"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from emlxd.cli.options import ConfigOption, ModelArgument, find_model, load_settings
from emlxd.errors import SourceError

if TYPE_CHECKING:
    from emlxd.config import ModelSettings


def pull(model: ModelArgument = None, config: ConfigOption = None) -> None:
    """Download one model of the configuration, or all.

    Each with its adapters. What is here already is not downloaded again.
    """
    from emlxd.sources import locate, sources_of

    settings = load_settings(config)
    wanted = settings.models if model is None else (find_model(settings, model),)
    failed = [each for each in wanted if not _fetched(each)]
    if failed:
        raise typer.Exit(1)
    for each in wanted:
        for name, source in zip((each.name, *each.adapter_names), sources_of(each), strict=True):
            typer.echo(f"{name}: {locate(source)}")


def _fetched(model: ModelSettings) -> bool:
    """Fetches a model, and says at once if that fails: the others may take long."""
    try:
        fetch_missing([model])
    except SourceError as error:
        typer.echo(error.message, err=True)
        return False
    return True


def fetch_missing(models: Iterable[ModelSettings]) -> None:
    """Fetch what is not on this machine, with a progress bar. Raises SourceError for the first that fails."""
    from emlxd.sources import fetch, locate, sources_of

    wanted = [(model.name, source) for model in models for source in sources_of(model)]
    missing = [(name, source) for name, source in wanted if locate(source) is None]
    if not missing:
        return
    from emlxd.cli.progress import progress_bar

    for name, source in missing:
        typer.echo(f"Fetching {name} from {source} ...", err=True)
        with progress_bar() as report:
            try:
                fetch(source, report)
            except SourceError as error:
                raise SourceError(f"{name}: {error.message}") from None
