"""The building blocks of a decoder. Shapes: B rows, L tokens a row, D the hidden size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import mlx.core as mx

from emlxd.graph.activations import Activation
from emlxd.graph.delta import Delta, join_deltas
from emlxd.graph.spec import NormSpec
from emlxd.graph.weights import Weight, fuse_rows


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + bias, with W [out, in] dense or quantised, and what adapters make of it."""

    weight: Weight
    bias: mx.array | None = None
    delta: Delta | None = None

    def __call__(self, x: mx.array) -> mx.array:
        y = self._plain(x)
        return self.delta.adapted(x, y, self.bias) if self.delta else y

    def _plain(self, x: mx.array) -> mx.array:
        if self.bias is None:
            return self.weight.times(x)
        if self.weight.quantization:
            return self.weight.times(x) + self.bias
        return mx.addmm(self.bias, x, self.weight.data.T)

    def with_rows(self, rows: mx.array) -> Linear:
        """Some of the outputs, or all in another order."""
        bias = None if self.bias is None else self.bias[rows]
        delta = self.delta.with_outputs(rows) if self.delta else None
        return Linear(self.weight.map_rows(lambda part: part[rows]), bias, delta)


@dataclass(frozen=True, slots=True)
class Parallel:
    """Several projections of the same input: one matmul where their formats allow it."""

    parts: tuple[Linear, ...]

    def __call__(self, x: mx.array) -> mx.array:
        """The outputs side by side."""
        if len(self.parts) == 1:
            return self.parts[0](x)
        return mx.concatenate([part(x) for part in self.parts], axis=-1)


def fuse(linears: Sequence[Linear]) -> Parallel:
    """One matmul for several: a step launches fewer kernels and reads the same bytes."""
    weight = fuse_rows([linear.weight for linear in linears])
    if weight is None:
        return Parallel(tuple(linears))
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if biases and len(biases) < len(linears):
        return Parallel(tuple(linears))
    delta = join_deltas([part.delta for part in linears], [part.weight.shape[-2] for part in linears])
    return Parallel((Linear(weight, mx.concatenate(biases) if biases else None, delta),))


@dataclass(frozen=True, slots=True)
class Embedding:
    """The token table, which may also be the head."""

    weight: Weight
    dtype: mx.Dtype

    def __call__(self, tokens: mx.array) -> mx.array:
        """tokens: int32 [B, L] -> [B, L, D]."""
        return self.weight.map_rows(lambda part: part[tokens]).dense(self.dtype).data


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square or layer normalisation of the last axis."""

    spec: NormSpec
    weight: mx.array
    bias: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        if self.spec.kind == "layer":
            return mx.fast.layer_norm(x, self.weight, self.bias, self.spec.eps)
        return mx.fast.rms_norm(x, self.weight, self.spec.eps)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Normalises each head of queries and keys; ``weight`` is [heads, head_dim]."""

    spec: NormSpec
    weight: mx.array

    def __call__(self, heads: mx.array) -> mx.array:
        """[B, L, heads, head_dim] -> the same"""
        if self.spec.kind == "layer":
            return mx.fast.layer_norm(heads, None, None, self.spec.eps) * self.weight
        return mx.fast.rms_norm(heads, None, self.spec.eps) * self.weight


@dataclass(frozen=True, slots=True)
class Mlp:
    """A feed-forward layer; ``gate_up`` is the gate and the linear part, or the latter alone."""

    gate_up: Parallel
    down: Linear
    activation: Activation
    gated: bool

    def __call__(self, x: mx.array) -> mx.array:
        h = self.gate_up(x)
        return self.down(self.activation(*mx.split(h, 2, axis=-1)) if self.gated else self.activation(h))


def arrays_in(part: Any) -> Iterator[mx.array]:
    """Every array in a tree of dataclasses and tuples; one that is used twice comes twice."""
    if isinstance(part, mx.array):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from arrays_in(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from arrays_in(getattr(part, field.name))
