"""JSON by the standard and in UTF-8, to which ``json`` alone does not keep."""

from __future__ import annotations

import json
import re
import sys
from typing import Any, Final

_MOST: Final = sys.float_info.max
_DIGITS: Final = len(str(int(_MOST)))
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def parsed(text: str, *, nearest: bool = False) -> Any:
    """The value of ``text``. A number that no double can hold is the nearest one, if that is wished for.

    Raises ValueError for what is no JSON, or nested too deeply to be read.
    """
    try:
        return json.loads(
            text,
            parse_float=_nearest_float if nearest else _finite_float,
            parse_int=_nearest_int if nearest else _finite_int,
            parse_constant=_refuse,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def written(value: Any) -> str:
    """``value`` as JSON. Raises ValueError for what JSON has not."""
    try:
        return escaped(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (RecursionError, TypeError) as error:
        raise ValueError(str(error)) from None


def escaped(text: str) -> str:
    """JSON with escapes for lone surrogates, which UTF-8 has no bytes for."""
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _nearest_float(text: str) -> float:
    return max(-_MOST, min(float(text), _MOST))


def _finite_float(text: str) -> float:
    value = float(text)
    return value if abs(value) <= _MOST else _refuse(text)


def _nearest_int(text: str) -> int:
    if _fits(text):
        return int(text)
    return -int(_MOST) if text.startswith("-") else int(_MOST)


def _finite_int(text: str) -> int:
    return int(text) if _fits(text) else _refuse(text)


def _fits(text: str) -> bool:
    return len(text.lstrip("-")) <= _DIGITS and abs(int(text)) <= _MOST


def _refuse(text: str) -> Any:
    raise ValueError(f"no JSON number: {text[:20]}")
