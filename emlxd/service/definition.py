"""What a service manager must know of the daemon, and what all of them do alike."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from emlxd.config import Settings
from emlxd.errors import UserError

STOP_MARGIN: Final = 15  # seconds beyond drain_timeout, for cut streams and for freeing models
RETRY_AFTER: Final = 10  # seconds between two starts of a daemon that failed
OPEN_FILES: Final = 8192  # a connection each, and the files of models


@dataclass(frozen=True, slots=True)
class Definition:
    """Paths are absolute. ``stop_timeout`` in whole seconds."""

    program: tuple[str, ...]
    config: Path
    stop_timeout: int
    cache: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        cache = {"EMLXD_CACHE": self.cache} if self.cache else {}
        return {"EMLXD_CONFIG": str(self.config)} | cache


def define(config: Path, settings: Settings) -> Definition:
    """The daemon of this Python environment with the file at ``config``."""
    return Definition(
        program=(sys.executable, "-m", "emlxd", "serve"),
        config=config.absolute(),
        stop_timeout=math.ceil(settings.server.drain_timeout) + STOP_MARGIN,
        cache=os.environ.get("EMLXD_CACHE"),
    )


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Raises UserError if there is no such program."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not on this machine.") from None


def must(command: Sequence[str]) -> str:
    """What the command printed. Raises UserError with its complaint if it fails."""
    done = run(command)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        reason = said[-1] if said else f"status {done.returncode}"
        raise UserError(f"`{' '.join(command)}` failed: {reason}")
    return done.stdout


def write(path: Path, content: bytes) -> None:
    """Replaces the file in one step. Raises UserError."""
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}.") from None
