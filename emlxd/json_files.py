"""The JSON files that come with a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from emlxd.errors import ModelFormatError


def read_json(file: Path) -> Any:
    """The value in ``file``. Raises ModelFormatError if it is missing or no JSON."""
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{file}: cannot be read: {error}") from None


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``, an empty one where there is no file. Raises ModelFormatError."""
    value = read_json(file) if file.is_file() else {}
    if not isinstance(value, dict):
        raise ModelFormatError(f"{file}: expected a JSON object")
    return value
