"""emlxd serve"""

from __future__ import annotations

import signal

from emlxd.cli.options import ConfigOption, find_config


def serve(config: ConfigOption = None) -> None:
    """Serve the models of the configuration until stopped."""
    # It asks for a reload, which the daemon makes up for once it can: by default it would end the process.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from emlxd.config_file import load

    path = find_config(config)
    settings = load(path)

    from emlxd import log
    from emlxd.cli.progress import progress_bar
    from emlxd.cli.pull import fetch_missing
    from emlxd.daemon import run

    log.configure(settings.log)
    # The others are fetched when they are wanted, and may fail then.
    fetch_missing(model for model in settings.models if model.load == "startup" and model.required)
    run(settings, path, progress_bar)
