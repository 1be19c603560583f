"""What the decode kernel reads of a model: where its arrays lie, and what becomes of each product."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from emlxd.graph.cuda.shape import CHUNK, TILE, UNIT
from emlxd.graph.cuda.support import Block
from emlxd.graph.layers import Linear, Norm
from emlxd.graph.transformer import Transformer

_STORE, _ADD, _GATE, _LOGITS = range(4)  # ``Phase::Kind`` of decode.cuh


class Table:
    """uint64 words: ``Layer`` of decode.cuh for each layer, and the head's ``Phase``.

    Holds what they point to.
    """

    def __init__(self, model: Transformer, blocks: Sequence[Block], places: Mapping[str, int]) -> None:
        layers = [(list(_phases(block, places)), block) for block in blocks]
        head = Phase.of(model.head, model.norm, _LOGITS, places["X"], 0)
        words = [word for phases, block in layers for word in _layer(phases, block)]
        words += head.words()
        packed = struct.pack(f"<{len(words)}Q", *words)
        self.words = mx.array(memoryview(packed)).view(mx.uint64)  # type: ignore[arg-type]
        self._held = layers, head

    @property
    def nbytes(self) -> int:
        """Of device memory, beside the model's."""
        layers, head = self._held
        phases = [head, *(phase for some, _ in layers for phase in some)]
        return self.words.nbytes + sum(phase.scales.nbytes for phase in phases if phase.scales is not None)


@dataclass(frozen=True, slots=True)
class Phase:
    """A product with a matrix, as decode.cuh has it.

    Unit u of the matrix is ``TILE`` rows from ``u * unit_rows`` on, and as many ``apart`` rows further on.
    ``scales`` are those of 4-bit weights as the kernel reads them.
    """

    linear: Linear
    norm: Norm | None
    kind: int
    source: int
    target: int
    unit_rows: int
    apart: int
    scales: mx.array | None

    @staticmethod
    def of(linear: Linear, norm: Norm | None, kind: int, source: int, target: int) -> Phase:
        # A gate's row goes with the one of the linear part, which follow all gates.
        rows = linear.weight.shape[0]
        unit_rows, apart = (TILE, rows // 2) if kind == _GATE else (UNIT, TILE)
        return Phase(linear, norm, kind, source, target, unit_rows, apart, _scales(linear, unit_rows))

    def words(self) -> list[int]:
        weight, norm = self.linear.weight, self.norm
        arrays = [weight.data, self.scales, self.linear.bias, norm.weight if norm else None]
        data, scales, bias, norm_weight = _addresses(arrays)
        rows, columns = weight.shape
        matrix = [data, scales, columns, rows // UNIT, self.unit_rows, self.apart]
        return [*matrix, bias, norm_weight, self.kind, self.source, self.target]


def _phases(block: Block, places: Mapping[str, int]) -> Iterator[Phase]:
    x, qkv, attended, hidden = (places[name] for name in ("X", "QKV", "ATTENDED", "HIDDEN"))
    yield Phase.of(block.qkv, block.attention_norm, _STORE, x, qkv)
    yield Phase.of(block.out, None, _ADD, attended, x)
    yield Phase.of(block.gate_up, block.mlp_norm, _GATE, x, hidden)
    yield Phase.of(block.down, None, _ADD, hidden, x)


def _layer(phases: Sequence[Phase], block: Block) -> list[int]:
    mixing = _addresses([block.qk_norm.weight if block.qk_norm else None, block.turns])
    return [*(word for phase in phases for word in phase.words()), *mixing]


def _scales(linear: Linear, unit_rows: int) -> mx.array | None:
    """bfloat16 [units, columns / CHUNK, UNIT, groups, 2]: a scale and a bias for each group of an item.

    A copy, since what a warp needs at once would else be 32 pieces of 4 bytes. None if there are none.
    """
    scales, biases = linear.weight.scales, linear.weight.biases
    if scales is None or biases is None:
        return None
    rows, columns = linear.weight.shape
    units, chunks = rows // UNIT, columns // CHUNK
    gate = unit_rows == TILE  # the tiles of a unit are half a matrix apart
    both = mx.stack([scales, biases], axis=-1)
    both = both.reshape(*((2, units) if gate else (units, 2)), TILE, chunks, -1, 2)
    both = both.transpose(*((1, 3, 0) if gate else (0, 3, 1)), 2, 4, 5)
    ordered = mx.contiguous(both.reshape(units, chunks, UNIT, -1, 2))
    mx.eval(ordered)
    return ordered


def _addresses(arrays: Sequence[mx.array | None]) -> list[int]:
    """Where arrays lie in device memory, 0 for None. They stay there while they are not read by the host."""
    there = [array for array in arrays if array is not None]
    names = [f"a{i}" for i in range(len(there))]
    kinds = "".join(str(array.dtype).rpartition(".")[2] for array in there)
    body = " ".join(
        f"out[{i}] = reinterpret_cast<unsigned long long>({name});" for i, name in enumerate(names)
    )
    kernel: Any = mx.fast.cuda_kernel(
        name=f"emlxd_addresses_{hashlib.sha256((kinds + body).encode()).hexdigest()[:16]}",
        input_names=names,
        output_names=["out"],
        source=body,
        ensure_row_contiguous=False,
    )
    (out,) = kernel(
        inputs=there,
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(len(there),)],
        output_dtypes=[mx.uint64],
    )
    found = iter(cast("list[int]", out.tolist()))
    return [0 if array is None else next(found) for array in arrays]
