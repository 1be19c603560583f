"""Text in whole words, for streams that read well."""

from __future__ import annotations

import re
import unicodedata

_MAX_HELD = 24

# Scripts written without spaces, and symbols that stand alone: each character is a unit of its own.
_ALONE = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff"  # Tibetan, Myanmar, Khmer
    "\u2190-\u27bf\u2900-\u2bff"  # arrows, technical, box drawing, dingbats
    "\u2e80-\u9fff"  # CJK, kana, CJK punctuation
    "\uf900-\ufaff\uff00-\uffef"
    "\U0001f000-\U0001faff"  # emoji
    "\U00020000-\U0003ffff"
)
# What stays with the character before it: marks, variation selectors, skin tones, tags.
_EXTEND = (
    "\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f\u3099\u309a\u302a-\u302f"
    "\u0e31\u0e33-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb3-\u0ebc\u0ec8-\u0ece"
    "\u0f18\u0f19\u0f35\u0f37\u0f39\u0f3e\u0f3f\u0f71-\u0f84\u0f86\u0f87\u0f8d-\u0fbc\u0fc6"
    "\u102b-\u103e\u1056-\u1059\u105e-\u1060\u1062-\u1064\u1067-\u106d\u1071-\u1074\u1082-\u108d"
    "\u108f\u109a-\u109d\u17b4-\u17d3\u17dd"
    "\ufe00-\ufe0f\U000e0100-\U000e01ef\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f"
)
_ZWJ = "\u200d"
_FLAG = "[\U0001f1e6-\U0001f1ff]"
_CLUSTER = f"(?:{_FLAG}{{2}}|[{_ALONE}])(?:[{_EXTEND}]|{_ZWJ}[{_ALONE}]?)*"
_UNIT = re.compile(rf"\s*(?:{_CLUSTER}|[^\s{_ALONE}]+|$)")


class WordChunker:
    """Releases text a unit at a time: a word with the white space before it, or one character of
    a script without spaces.

    The last unit is held back, as it may still grow, unless it ends in white space or is longer
    than any word. The pieces join to the text that went in.
    """

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        text = self._held + text
        cut = _start_of_last_unit(text)
        if len(text) - cut > _MAX_HELD:
            cut = _start_of_last_character(text, cut)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _start_of_last_unit(text: str) -> int:
    if text[-1:].isspace():
        # "\r" waits for the "\n" that belongs to it.
        return len(text) if text[-1] != "\r" else _start_of_last_match(text)
    if text.isascii():
        parts = text.rsplit(None, 1)
        return len(parts[0]) if len(parts) > 1 else 0
    return _start_of_last_match(text)


def _start_of_last_match(text: str) -> int:
    start = 0
    for unit in _UNIT.finditer(text):
        if unit.end() > unit.start():
            start = unit.start()
    return start


def _start_of_last_character(text: str, start: int) -> int:
    """Where the last character with its marks starts, or the end of ``text`` if there is no place to cut."""
    cuts = range(len(text) - 1, start, -1)
    return next((cut for cut in cuts if not _joins(text[cut - 1], text[cut])), len(text))


def _joins(left: str, right: str) -> bool:
    return _ZWJ in (left, right) or unicodedata.category(right).startswith("M")
