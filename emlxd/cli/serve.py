"""emlxd serve"""

from __future__ import annotations

from emlxd.cli.options import ConfigOption, load_settings


def serve(config: ConfigOption = None) -> None:
    """Serve the models of the configuration until stopped."""
    settings = load_settings(config)

    from emlxd import log
    from emlxd.cli.pull import fetch_missing
    from emlxd.server import run

    log.configure(settings.log)
    fetch_missing(settings.models)
    run(settings)
