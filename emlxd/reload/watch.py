"""Notices that a file changed, whatever way its editor or its mount replaces it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import structlog
from watchfiles import awatch

log = structlog.get_logger(__name__)

DEBOUNCE: Final = 300  # milliseconds in which several changes are one
LOOK: Final = 5000  # milliseconds after which the file is looked at anyway: its folder may have gone
MAX_LINKS: Final = 40  # as Linux


async def changes(path: Path, seen: bytes | None) -> AsyncIterator[None]:
    """Yields whenever the file at ``path`` has other content than before, or has gone; ends never.

    ``seen`` is the ``fingerprint`` that it had when somebody last looked.

    Folders are watched, not the file: editors and mounted config maps put another file in its place. So
    are the folders of every link on the way to it, whose targets may move.
    """
    async for stirred in _looks(path):
        found = fingerprint(path)
        between = found is None and stirred  # an editor's two steps: wait for a quiet look
        if found != seen and not between:
            seen = found
            yield


async def _looks(path: Path) -> AsyncIterator[bool]:
    """Yields when it is time to look at the file, whether something in its folders has just changed."""
    failures = 0
    while True:
        try:
            folders = watched_folders(path)
            async for events in awatch(
                *folders,
                watch_filter=None,
                debounce=DEBOUNCE,
                rust_timeout=LOOK,
                yield_on_timeout=True,
                recursive=False,
            ):
                failures = 0
                yield bool(events)
                if watched_folders(path) != folders:
                    break
        except (OSError, RuntimeError) as error:  # no file descriptor is left, or a folder has just gone
            failures += 1
            if failures == 2:
                log.warning(
                    "the file is looked at every few seconds: it cannot be watched", reason=str(error)
                )
            await asyncio.sleep(LOOK / 1000)
            yield False


def fingerprint(path: Path) -> bytes | None:
    """The file's content; None while there is none that can be read."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def watched_folders(path: Path) -> list[Path]:
    """The folders of ``path`` and of all links on the way to the file, as far as they exist."""
    path = path.absolute()
    folders: list[Path] = []
    for _ in range(MAX_LINKS):
        links = (part.parent for part in path.parents if part.is_symlink())
        folders += [path.parent, *(folder for folder in links if folder != Path(path.anchor))]
        if not path.is_symlink():
            break
        path = path.parent / path.readlink()
    found = {folder.resolve() for folder in folders if folder.is_dir()}
    return sorted(found) or [next(parent for parent in path.parents if parent.is_dir())]
