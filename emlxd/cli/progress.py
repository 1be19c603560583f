"""How far a download or a load is, as one line on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emlxd.downloads.cache import Progress


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Gives a function to report progress to, such as ``sources.fetch`` takes.

    Draws on standard error, and only if that is a terminal.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", visible=False, total=None)

        def report(what: str, done: int, total: int | None) -> None:
            bar.update(task, description=what, completed=done, total=total, visible=True)

        yield report
