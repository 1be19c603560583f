"""Reads GGUF files (versions 2 and 3, little-endian): metadata, tensor table, raw tensor bytes.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every length is checked against
the file before it is used, so a damaged file gives ``ModelFormatError`` and nothing worse.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from emlxd.errors import ModelFormatError

MAGIC: Final = b"GGUF"
MAX_RANK: Final = 4
MAX_DIMENSION: Final = 2**31 - 1  # of an array in MLX
MAX_NESTING: Final = 4

_SCALARS: Final[Mapping[int, str]] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING: Final = 8
_ARRAY: Final = 9


@dataclass(frozen=True, slots=True)
class BlockType:
    """How a tensor's values are stored: ``weights`` of them in every ``bytes`` bytes."""

    name: str
    weights: int
    bytes: int


BLOCK_TYPES: Final[Mapping[int, BlockType]] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in the file. ``shape`` is row-major, outermost dimension first."""

    name: str
    shape: tuple[int, ...]
    block: BlockType
    offset: int
    nbytes: int


class GgufFile:
    """The header of a GGUF file; the tensors' bytes are read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self.metadata, self.tensors = _Reader(path, data).read()
        except ValueError:
            raise ModelFormatError(f"{path}: the file is empty, expected a GGUF file") from None
        except OSError as error:
            raise ModelFormatError(f"{path}: cannot be read: {error.strerror}") from error

    def read(self, name: str) -> bytes:
        """The raw bytes of a tensor. Not mapped: mapped pages would count as resident memory."""
        info = self.tensors[name]
        with self.path.open("rb") as file:
            file.seek(info.offset)
            return file.read(info.nbytes)


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self._bytes(4) != MAGIC:
            raise self._error("does not start with 'GGUF', so it is not a GGUF file")
        version = self._scalar("<I")
        if version not in (2, 3):
            raise self._error(f"GGUF version {version} is not supported, expected 2 or 3")
        tensor_count, metadata_count = self._scalar("<Q"), self._scalar("<Q")
        metadata = dict(self._entry() for _ in range(self._count(metadata_count, 13)))
        headers = [self._tensor_header() for _ in range(self._count(tensor_count, 24))]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise self._error(f"general.alignment is {alignment!r}, expected a positive integer")
        start = -(-self._at // alignment) * alignment
        return metadata, {header[0]: self._place(start, *header) for header in headers}

    def _entry(self) -> tuple[str, Any]:
        return self._string(), self._value(self._scalar("<I"))

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            if depth == MAX_NESTING:
                raise self._error("metadata arrays are nested too deeply")
            item, count = self._scalar("<I"), self._scalar("<Q")
            if layout := _SCALARS.get(item):
                size = struct.calcsize(layout)
                count = self._count(count, size)
                return list(struct.unpack(f"<{count}{layout[1]}", self._bytes(count * size)))
            if item == _STRING:
                return self._strings(self._count(count, 8))
            return [self._value(item, depth + 1) for _ in range(self._count(count, 8))]
        if layout := _SCALARS.get(kind):
            return self._scalar(layout)
        raise self._error(f"metadata has the unknown value type {kind}")

    def _tensor_header(self) -> tuple[str, tuple[int, ...], int, int]:
        name, rank = self._string(), self._scalar("<I")
        if rank > MAX_RANK:
            raise self._error(f"tensor '{name}' has {rank} dimensions, expected at most {MAX_RANK}")
        shape = tuple(self._scalar("<Q") for _ in range(rank))[::-1]
        return name, shape, self._scalar("<I"), self._scalar("<Q")

    def _place(self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        block = BLOCK_TYPES.get(kind)
        if block is None:
            known = ", ".join(sorted(b.name for b in BLOCK_TYPES.values()))
            raise self._error(f"tensor '{name}' has the unsupported type {kind}, supported are {known}")
        if not all(0 < dimension <= MAX_DIMENSION for dimension in shape):
            raise self._error(f"tensor '{name}' has the shape {shape}, expected 1 to {MAX_DIMENSION} each")
        count = math.prod(shape)
        if count % block.weights or (shape and shape[-1] % block.weights):
            raise self._error(f"tensor '{name}' of shape {shape} does not divide into {block.name} blocks")
        nbytes = count // block.weights * block.bytes
        if start + offset + nbytes > self._size:
            raise self._error(
                f"is truncated: tensor '{name}' ends at byte {start + offset + nbytes}, "
                f"but the file has {self._size}"
            )
        return TensorInfo(name, shape, block, start + offset, nbytes)

    def _string(self) -> str:
        raw = self._bytes(self._scalar("<Q"))
        return raw.decode("utf-8", errors="replace")

    def _strings(self, count: int) -> list[str]:
        """Vocabularies have a hundred thousand: the loop is bare for speed."""
        data, size, at, found = self._data, self._size, self._at, []
        for _ in range(count):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            if at > size:
                raise self._error(f"is truncated: a string ends at byte {at}, {size} in all")
            found.append(data[start:at].decode("utf-8", errors="replace"))
        self._at = at
        return found

    def _scalar(self, layout: str) -> Any:
        return struct.unpack(layout, self._bytes(struct.calcsize(layout)))[0]

    def _count(self, count: int, least: int) -> int:
        """Refuses a count of items, each of ``least`` bytes or more, that the file has no room for."""
        if count * least > self._size - self._at:
            raise self._error(f"is truncated or damaged: {count} items announced at byte {self._at}")
        return count

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > self._size:
            raise self._error(f"is truncated: {count} bytes expected at byte {self._at}, {self._size} in all")
        chunk = self._data[self._at : end]
        self._at = end
        return chunk

    def _error(self, what: str) -> ModelFormatError:
        return ModelFormatError(f"{self._path}: {what}")
