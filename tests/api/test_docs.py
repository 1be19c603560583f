"""docs/api.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from emlxd import errors
from emlxd.api.openapi import OPERATIONS
from emlxd.errors import EmlxdError, UserError
from emlxd.worker.mailbox import MAX_UNREAD

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def test_the_table_of_errors() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| `(\w+)` \| (\S.*?) \|$", TEXT, re.M)
    told = {name: (int(status), kind, code.strip("`")) for name, status, kind, code in rows}
    true = {
        name: (error.status, error.type, error.code or "by case")
        for name, error in vars(errors).items()
        if isinstance(error, type)
        and issubclass(error, EmlxdError)
        and not issubclass(error, UserError)
        and error is not EmlxdError
    }
    assert told == true


def test_every_code_is_told() -> None:
    sources = (Path(__file__).parents[2] / "emlxd").rglob("*.py")
    codes = {code for file in sources for code in re.findall(r'\bcode="(\w+)"', file.read_text())}
    assert {code for code in codes if f"`{code}`" not in TEXT} == set()


def test_every_route_is_told() -> None:
    assert {one.path for one in OPERATIONS if f"{one.path}`" not in TEXT} == set()


def test_the_bound_of_a_stream() -> None:
    assert f"{MAX_UNREAD // 1024} KiB" in TEXT
