"""The kinds of values in config.yaml: how each is written, and what is wrong with one that is not.

Each raises ValueError with what was found and what was expected, which pydantic collects.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

_SIZE_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_TIME_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(value: Any) -> Any:
    """Bytes from ``256MB`` (powers of 1000) or ``1GiB`` (powers of 1024). Numbers pass unchanged.

    Raises ValueError for any other text.
    """
    if not isinstance(value, str):
        return _not_bool(value)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value.strip().lower())
    if match is None or match[2] not in _SIZE_UNITS:
        raise ValueError(f"{value!r} is not a size, expected a number of bytes, or one like 256MB or 1GiB")
    return round(float(match[1]) * _SIZE_UNITS[match[2]])


def parse_duration(value: Any) -> Any:
    """Seconds from ``500ms``, ``15s``, ``5m`` or ``1h30m``. Numbers pass unchanged.

    Raises ValueError for any other text.
    """
    if not isinstance(value, str) or re.fullmatch(r"\d+(\.\d+)?", value.strip()):
        return _not_bool(value)
    part = r"(\d+(?:\.\d+)?)\s*(ms|[smhd])"
    if not re.fullmatch(rf"(?:{part}\s*)+", value.strip()):
        raise ValueError(f"{value!r} is not a duration, expected a number of seconds, or one like 15s or 5m")
    return sum(float(number) * _TIME_UNITS[unit] for number, unit in re.findall(part, value))


def parse_budget(value: Any) -> Any:
    """A share of 1 from ``80%``, or bytes from a size. Numbers pass unchanged.

    Raises ValueError for any other text.
    """
    if not isinstance(value, str) or not value.strip().endswith("%"):
        return parse_size(value)
    share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", value.strip())
    if share is None or not 0 < float(share[1]) <= 100:
        raise ValueError(f"{value!r} is not a share, expected one from 1% to 100%, or a size like 24GiB")
    return float(share[1]) / 100


def _not_bool(value: Any) -> Any:
    # Python counts True as 1, but nobody who writes `slots: yes` means one slot.
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a number, expected a number")
    return value


def shaped(pattern: str, expected: str) -> AfterValidator:
    """A check that the whole text matches ``pattern``."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{value!r} is malformed, expected {expected}")
        return value

    return AfterValidator(check)


def inside(value: str) -> str:
    """A check that a file path cannot lead out of its package or repository."""
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in value:
        raise ValueError(f"{value!r} leads elsewhere, expected a path inside the package or repository")
    return value


def _no_spaces(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"[!-~]+", value):
        raise ValueError("the key is malformed, expected visible ASCII characters without spaces")
    return value


Whole = Annotated[int, BeforeValidator(_not_bool)]
Number = Annotated[float, BeforeValidator(_not_bool), Field(allow_inf_nan=False)]
Size = Annotated[int, BeforeValidator(parse_size)]
Budget = Annotated[float, BeforeValidator(parse_budget), Field(gt=0, allow_inf_nan=False)]
Duration = Annotated[float, BeforeValidator(parse_duration), Field(allow_inf_nan=False)]
ApiKey = Annotated[SecretStr, BeforeValidator(_no_spaces)]
Origin = Annotated[
    str, shaped(r"https?://[^/\s*]+", "an origin without a path, such as https://chat.example.com")
]
ModelName = Annotated[
    str,
    shaped(
        r"[A-Za-z0-9][A-Za-z0-9._:/-]*", "letters, digits and . _ : / -, with a letter or digit at the start"
    ),
]
AdapterName = Annotated[
    str, shaped(r"[A-Za-z0-9][A-Za-z0-9._-]*", "letters, digits and . _ -, with a letter or digit first")
]
