"""The sizes that the decode kernel is compiled for, and where its phases leave their results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

LOG2_E: Final = math.log2(math.e)
WARPS: Final = 16  # of a block
THREADS: Final = 32 * WARPS
CHUNK: Final = 128  # columns of a matrix that a warp takes at once
TILE: Final = 8  # rows of a matrix that one instruction takes; they come in pairs
MAX_ROWS: Final = 32
STAGE_BYTES: Final = 150_000  # of shared memory, for the rows that a matrix is multiplied with


@dataclass(frozen=True, slots=True)
class Format:
    """How matrices are stored: 16 bits dense, or 4 bits with a scale and a bias for each ``group``."""

    bits: int
    group: int = 64


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A decoder, and ``blocks``, the number of the device's multiprocessors."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_context: int
    format: Format
    eps: float
    qk_eps: float
    scale: float
    magnitude: float
    residual_scale: float
    blocks: int

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def splits(self, rows: int, window: int) -> int:
        """How many blocks share the positions of one key head of one row."""
        return max(1, min(self.blocks // (rows * self.kv_heads), window // 64))


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What a kernel is compiled for: a decoder, and steps of at most 8 * ``halves`` rows."""

    decoder: DecoderShape
    halves: int

    @staticmethod
    def of(decoder: DecoderShape, rows: int) -> KernelShape:
        return KernelShape(decoder, 1 if rows <= 8 else 2 if rows <= 16 else 4)

    @property
    def shared_bytes(self) -> int:
        """The dynamic shared memory of a block."""
        return self._staged + self._sums + WARPS * 4

    @property
    def _staged(self) -> int:
        d = self.decoder
        share = d.heads // d.kv_heads
        attention = 4 * (share * d.head_dim + WARPS * share * (d.head_dim + 2))
        if self.halves > 1:
            return _aligned(max(attention, 2 * d.width), 16)
        widest = max(d.width, d.heads * d.head_dim, d.hidden)
        return _aligned(max(attention, min(STAGE_BYTES, 2 * 8 * (widest + 32))), 16)

    @property
    def _sums(self) -> int:
        return 2 * WARPS * (8 * self.halves) * (2 * TILE) * 4

    def constants(self) -> str:
        """The C++ struct that the kernel's templates take."""
        d = self.decoder
        places, _ = places_of(d)
        integers = {
            "HALVES": self.halves,
            "WIDTH": d.width,
            "QKV_WIDTH": d.qkv_width,
            "HIDDEN_WIDTH": d.hidden,
            "HEADS": d.heads,
            "KV_HEADS": d.kv_heads,
            "DIM": d.head_dim,
            "VOCABULARY": d.vocabulary,
            "BITS": d.format.bits,
            "GROUP": d.format.group,
            "MAX_CONTEXT": d.max_context,
            "STAGED": self._staged,
            "SUMS": self._sums,
            **places,
        }
        floats = {
            "EPS": d.eps,
            "QK_EPS": d.qk_eps,
            "SCALE": d.scale * LOG2_E,
            "MAGNITUDE": d.magnitude,
            "RESIDUAL_SCALE": d.residual_scale,
        }
        lines = [f"  static constexpr int {name} = {value};" for name, value in integers.items()]
        lines += [f"  static constexpr float {name} = {float(value)!r}f;" for name, value in floats.items()]
        return "namespace emlxd {\nstruct Sizes {\n" + "\n".join(lines) + "\n};\n}\n"


def places_of(d: DecoderShape) -> tuple[dict[str, int], int]:
    """Where each buffer begins in the scratch memory, and the bytes of all together."""
    places, at = {}, 0
    for name, size in _buffers(d):
        places[name] = at
        at += _aligned(size, 256)
    return places, at


def _buffers(d: DecoderShape) -> Iterator[tuple[str, int]]:
    attended = d.heads * d.head_dim
    units = max(d.blocks, MAX_ROWS * d.kv_heads)
    yield "BARRIER", 8
    yield "COUNTERS", 4 * MAX_ROWS * d.kv_heads
    yield "X", 2 * MAX_ROWS * d.width
    yield "NORMED", 2 * MAX_ROWS * d.width
    yield "QKV", 2 * MAX_ROWS * d.qkv_width
    yield "ATTENDED", 2 * MAX_ROWS * attended
    yield "HIDDEN", 2 * MAX_ROWS * d.hidden
    yield "PARTS", 4 * units * (d.heads // d.kv_heads) * (d.head_dim + 2)


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to
