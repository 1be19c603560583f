"""Reads safetensors files, after checking everything in their header against the file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx

from emlxd.errors import ModelFormatError

_MAX_HEADER: Final = 100 * 1024 * 1024
_BITS: Final[Mapping[str, int]] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip


def open_safetensors(path: Path) -> dict[str, mx.array]:
    """The tensors by name, read when evaluated. Raises ModelFormatError for a damaged file."""
    try:
        _check(path)
        return cast("dict[str, mx.array]", mx.load(str(path)))
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read: {error.strerror}") from error
    except RuntimeError as error:
        raise ModelFormatError(f"{path}: is damaged or truncated: {error}") from None


def _check(path: Path) -> None:
    """MLX's reader trusts the header, so nothing may reach it that would make it read or reserve too much."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise _damaged(path, f"its header is announced as {length} bytes, the file has {size}")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise _damaged(path, f"its header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no JSON object")
    for name, entry in header.items():
        if name != "__metadata__":
            _check_tensor(path, name, entry, size - 8 - length)
        elif not isinstance(entry or {}, dict) or not all(isinstance(v, str) for v in (entry or {}).values()):
            raise _damaged(path, "its metadata are no strings")


def _check_tensor(path: Path, name: str, entry: Any, size: int) -> None:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)], **other}:
            whole = all(type(dimension) is int and 0 <= dimension < 2**31 for dimension in shape)
            placed = not other and dtype in _BITS and whole and 0 <= start <= end <= size
            if placed and math.prod(shape) * _BITS[dtype] == 8 * (end - start):
                return
    raise _damaged(path, f"the entry of tensor '{name}' does not fit the file: {str(entry)[:200]}")


def _damaged(path: Path, what: str) -> ModelFormatError:
    return ModelFormatError(f"{path}: is damaged or truncated: {what}")
