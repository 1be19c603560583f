"""docs/structured-output.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from emlxd.config import ToolFormat
from emlxd.text import grammar, json_schema
from emlxd.text.tools.format import MAX_CALLS
from emlxd.text.tools.table import FORMATS

PAGE = (Path(__file__).parents[2] / "docs" / "structured-output.md").read_text("utf-8")


def listed(title: str) -> list[str]:
    match = re.search(rf"- \*\*{title}:\*\* (.*?)(?=\n-|\n\n)", PAGE, re.DOTALL)
    assert match
    return re.findall(r"`([^`]+)`", match[1])


def test_keywords_and_formats() -> None:
    assert listed("Enforced") == sorted(json_schema.ENFORCED)
    assert listed("Formats") == sorted(json_schema.FORMATS)
    assert listed("Refused") == sorted(json_schema.REFUSED)


def test_limits() -> None:
    rows = re.findall(r"\| ([^|]+) \| ([\d,]+) \|", PAGE)
    assert [int(value.replace(",", "")) for _, value in rows] == [
        json_schema.MAX_DEPTH,
        json_schema.MAX_SCHEMAS,
        json_schema.MAX_ENUM,
        json_schema.MAX_PROPERTIES,
        json_schema.MAX_PATTERN,
        grammar.MAX_REGEX,
        json_schema.MAX_LITERAL,
        grammar.MAX_CHOICES,
        grammar.MAX_SOURCE,
    ]
    assert f"at most {MAX_CALLS} calls" in PAGE


def test_tool_formats() -> None:
    rows = re.findall(r"^\| ((?:`[a-z0-9-]+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([^`]+)`", row)} == set(FORMATS)


def test_formats_that_the_configuration_takes() -> None:
    assert set(get_args(ToolFormat)) == set(FORMATS)
