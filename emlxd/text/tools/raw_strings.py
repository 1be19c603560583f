"""Strings as they stand in a text, without quotes: what a schema asks of them, as Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final


class Unenforceable(Exception):
    """What a text without quotes cannot be held to; its text says what and why."""


KEYWORDS: Final = frozenset({"format", "maxLength", "minLength", "pattern"})
"""What a schema may ask of strings alone."""

_MONTHS = (
    r"(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
)
_LEAP_YEAR = r"([0-9][0-9](0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = rf"([0-9]{{4}}-({_MONTHS})|{_LEAP_YEAR}-02-29)"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[-+]{_CLOCK})"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_HEX = "[0-9a-fA-F]"

_ANYTHING: Final = "(?s:.*)"
_PIECE: Final = re.compile(r"\\.|\[\^?(?:\\.|[^\[\]\\])+\]|\(\?(?::|P?<)|.", re.DOTALL)
"""Of a pattern: an escape, a class, the start of a group, or another character."""
_UNREADABLE: Final = frozenset({"^", "$", "[", r"\A", r"\z", r"\b", r"\B"})
_ESCAPABLE: Final = re.compile(r"\\.|[/\n\r]", re.DOTALL)
_ESCAPES: Final = MappingProxyType({"/": r"\/", "\n": r"\n", "\r": r"\r"})

_FORMATS: Final = MappingProxyType(
    {
        "date": _DATE,
        "date-time": f"{_DATE}T{_TIME}",
        "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
        "time": _TIME,
        "uuid": f"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    }
)


def bounded(schema: Mapping[str, Any]) -> str:
    """Lark for the strings that the ``KEYWORDS`` of ``schema`` allow. Raises Unenforceable."""
    parts = []
    if "minLength" in schema or "maxLength" in schema:
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
        parts.append(f"/(?s:.{{{least},{'' if most is None else int(most)}}})/")
    if "pattern" in schema:
        parts.append(_found(schema["pattern"]))
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise Unenforceable(f"'format' is enforced only if it is one of {', '.join(_FORMATS)}")
        parts.append(f"/{_FORMATS[schema['format']]}/")
    return " & ".join(parts)


def without(mark: str) -> str:
    """Lark for the texts in which ``mark`` does not occur. It begins with "<", which it has only once.

    Not as a complement, which is dear beside a length: that it has no more texts is found by trying.
    """
    rest = ""
    for character in map(_in_class, reversed(mark[1:])):
        rest = f"(?:[^<{character}][^<]*{f'|[{character}]{rest}' if rest else ''})?"
    return f"/[^<]*(?:<{rest})*/"


def other_than(pattern: str, texts: Sequence[str]) -> str:
    """Lark for what ``pattern`` matches, but for ``texts``."""
    known = " | ".join(map(json.dumps, texts))
    return f"(/{pattern}/ & ~({known}))" if known else f"/{pattern}/"


def _in_class(character: str) -> str:
    return f"\\{character}" if character == "/" else re.escape(character)


def _found(pattern: str) -> str:
    """Lark for the texts in which ``pattern`` matches, which may be anywhere where it does not say."""
    body = pattern.removeprefix("^")
    pieces = _PIECE.findall(body)
    starts, ends = body != pattern, pieces[-1:] == ["$"]
    if ends:
        pieces.pop()
    if _UNREADABLE.intersection(pieces) or "(?" in map("".join, pairwise(pieces)):
        raise Unenforceable(
            "a 'pattern' may have '^' and '$' only at its ends, no word boundaries, no flags, and no bracket "
            "in a class without a backslash"
        )
    if (starts or ends) and _has_alternatives(pieces):
        raise Unenforceable("a 'pattern' with '^' or '$' must have its alternatives in parentheses")
    text = "".join(_ESCAPABLE.sub(lambda match: _ESCAPES.get(match[0], match[0]), piece) for piece in pieces)
    return f"/{'' if starts else _ANYTHING}(?:{text}){'' if ends else _ANYTHING}/"


def _has_alternatives(pieces: Sequence[str]) -> bool:
    """Whether there are any outside of all parentheses."""
    depth = 0
    for piece in pieces:
        depth += piece.startswith("(") - (piece == ")")
        if piece == "|" and depth == 0:
            return True
    return False
