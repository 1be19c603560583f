"""The API keys that a configuration names."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Final

from emlxd.config import ServerSettings
from emlxd.errors import UserError

_TOO_OPEN: Final = stat.S_IWGRP | stat.S_IRWXO


def read_keys(server: ServerSettings) -> list[bytes]:
    """Every key that is configured. Raises UserError for a file that is missing, empty, or open to others."""
    keys = [key.get_secret_value().encode() for key in server.api_keys]
    return keys if server.api_keys_file is None else [*keys, *_read_file(server.api_keys_file)]


def _read_file(path: Path) -> list[bytes]:
    where = f"server.api_keys_file {path}"
    try:
        with path.open(encoding="ascii") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            lines = file.read().splitlines()
    except OSError as error:
        raise UserError(f"Cannot read {where}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"Cannot read {where}: byte {error.start} is not ASCII, expected ASCII.") from None
    if mode & _TOO_OPEN:
        raise UserError(f"{where} has mode {mode:04o}: others may use it, expected 0600. chmod 600 {path}")
    keys = [line.split("#")[0].strip().encode() for line in lines]
    if not any(keys):
        raise UserError(f"{where} has no keys, expected one a line.")
    return list(filter(None, keys))
