"""Notices that a file changed, whatever way its editor or its mount replaces it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from watchfiles import awatch

DEBOUNCE: Final = 300  # milliseconds in which several changes are one
LOOK: Final = 5000  # milliseconds after which the file is looked at anyway: its folder may have gone
MAX_LINKS: Final = 40  # as Linux


async def changes(path: Path) -> AsyncIterator[None]:
    """Yields whenever the file at ``path`` has other content than before, or has gone; ends never.

    Folders are watched, not the file: editors and mounted config maps put another file in its place. So
    are the folders of every link on the way to it, whose targets may move.
    """
    seen = fingerprint(path)
    while True:
        folders = watched_folders(path)
        async for events in awatch(
            *folders,
            watch_filter=None,
            debounce=DEBOUNCE,
            rust_timeout=LOOK,
            yield_on_timeout=True,
            recursive=False,
        ):
            found = fingerprint(path)
            between = found is None and bool(events)  # an editor's two steps: wait for a quiet look
            if found != seen and not between:
                seen = found
                yield
            if watched_folders(path) != folders:
                break


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
