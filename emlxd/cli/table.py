"""The plain tables of the command line."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table


def make_table(*titles: str, right: int = 0) -> Table:
    """A table without lines; its last ``right`` columns are numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, title in enumerate(titles):
        table.add_column(title, overflow="fold", justify="right" if place >= len(titles) - right else "left")
    return table


def console() -> Console:
    """Into a pipe or a file every row is one line."""
    return Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 1000)
