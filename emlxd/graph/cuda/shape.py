"""The sizes that the decode kernel is compiled for, and where its phases leave their results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

LOG2_E: Final = math.log2(math.e)
WARPS: Final = 16  # of a block
THREADS: Final = 32 * WARPS
CHUNK: Final = 128  # columns of a matrix that two items have, or one in 4 bits
TILE: Final = 8  # rows of a matrix that one instruction takes; they come in pairs
UNIT: Final = 2 * TILE  # rows of a matrix that are computed together
MAX_ROWS: Final = 32
SPAN: Final = 256  # elements of a row that a warp normalises at once
SHARED_BYTES: Final = 227 * 1024  # of a multiprocessor, all that one block can have
_MOST_UNDER_WAY: Final = {16: 4, 4: 6}  # items a warp, by bits
LAYER_WORDS: Final = 4 * 11 + 2  # ``Layer`` of decode.cuh


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

    @property
    def fits(self) -> bool:
        """Whether the shared memory suffices."""
        return all(KernelShape(self, halves).fits for halves in (1, 2, 4))

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
    def fits(self) -> bool:
        """Whether a block has the shared memory that it needs."""
        return self._room >= self._ring_bytes

    @property
    def depth(self) -> int:
        """How many items of a matrix a warp has under way: as many as help, if there is room for so many."""
        return max(2, min(_MOST_UNDER_WAY[self.decoder.format.bits], self._room // self._items_bytes))

    @property
    def shared_bytes(self) -> int:
        """The dynamic shared memory of a block: what is staged, what is small, and the ring of weights."""
        return self.staged_bytes + self._small_bytes + self._ring_bytes

    @property
    def staged_bytes(self) -> int:
        """For the rows that a matrix is multiplied with, all of them if there is room, and for attention."""
        d = self.decoder
        rows = self._bytes_of_rows(max(d.width, d.heads * d.head_dim, d.hidden))
        return self._least_bytes + min(max(0, rows - self._least_bytes), self._room - self._ring_bytes)

    @property
    def _least_bytes(self) -> int:
        """What is staged in any case: attention, and what a block normalises."""
        d = self.decoder
        share = d.heads // d.kv_heads
        attention = 4 * (share * d.head_dim + WARPS * share * (d.head_dim + 2))
        return _aligned(max(attention, self._bytes_of_rows(d.width) if self.halves == 1 else 2 * d.width), 16)

    def _bytes_of_rows(self, columns: int) -> int:
        """What the most rows take, each padded as ``Step::run`` does."""
        return 2 * 8 * self.halves * (columns + 32)

    @property
    def _small_bytes(self) -> int:
        """For sums, and for what rows are normalised with."""
        rows = 8 * self.halves
        return self._sums_bytes + 4 * rows + 4 * rows * -(-self.decoder.width // SPAN)

    @property
    def _sums_bytes(self) -> int:
        """For two units of each warp, or, while there are none, what each thread lays aside."""
        return max(2 * WARPS * 8 * self.halves * UNIT * 4, 40 * THREADS)

    @property
    def _ring_bytes(self) -> int:
        return self.depth * self._items_bytes

    @property
    def _items_bytes(self) -> int:
        """``Item::BYTES`` of items.cuh for each warp."""
        f = self.decoder.format
        data = UNIT * 128
        scales = UNIT * 4 * CHUNK // f.group
        return WARPS * (data if f.bits == 16 else data // 2 + scales)

    @property
    def _room(self) -> int:
        """What is left for the ring, and for more rows."""
        d = self.decoder
        static = 8 * (d.layers + 1) * LAYER_WORDS + 16 * d.layers + 1024
        return (SHARED_BYTES - static - self._small_bytes - self._least_bytes) // 16 * 16

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
            "STAGED": self.staged_bytes,
            "SUMS": self._sums_bytes,
            "RING": self.staged_bytes + self._small_bytes,
            "DEPTH": self.depth,
            "RING_BYTES": self._ring_bytes,
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
    yield "WEIGHTED", 2 * MAX_ROWS * d.width
    yield "INVERSE", 4 * MAX_ROWS
    yield "QKV", 2 * MAX_ROWS * d.qkv_width
    yield "ATTENDED", 2 * MAX_ROWS * attended
    yield "HIDDEN", 2 * MAX_ROWS * d.hidden
    yield "PARTS", 4 * units * (d.heads // d.kv_heads) * (d.head_dim + 2)


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to
