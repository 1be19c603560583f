"""The building blocks of a decoder. Shapes: B rows, L tokens a row, D the hidden size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from emlxd.graph.weights import Weight, fuse_rows


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + bias, with W [out, in] dense or quantised."""

    weight: Weight
    bias: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        w = self.weight
        if (q := w.quantization) and w.scales is not None:
            y = mx.quantized_matmul(
                x, w.data, w.scales, w.biases, group_size=q.group_size, bits=q.bits, mode=q.mode
            )
            return y if self.bias is None else y + self.bias
        if self.bias is None:
            return x @ w.data.T
        return mx.addmm(self.bias, x, w.data.T)


@dataclass(frozen=True, slots=True)
class Parallel:
    """Several projections of the same input: one matmul where their formats allow it."""

    parts: tuple[Linear, ...]
    sizes: tuple[int, ...]

    def __call__(self, x: mx.array) -> mx.array:
        """The outputs side by side: [..., sum(sizes)]."""
        if len(self.parts) == 1:
            return self.parts[0](x)
        return mx.concatenate([part(x) for part in self.parts], axis=-1)


def fuse(linears: Sequence[Linear]) -> Parallel:
    """One matmul for several: a step launches fewer kernels and reads the same bytes."""
    sizes = tuple(linear.weight.data.shape[0] for linear in linears)
    weight = fuse_rows([linear.weight for linear in linears])
    if weight is None:
        return Parallel(tuple(linears), sizes)
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if biases and len(biases) < len(linears):
        return Parallel(tuple(linears), sizes)
    return Parallel((Linear(weight, mx.concatenate(biases) if biases else None),), sizes)


@dataclass(frozen=True, slots=True)
class Embedding:
    """The token table, which may also be the head."""

    weight: Weight
    dtype: mx.Dtype

    def __call__(self, tokens: mx.array) -> mx.array:
        """tokens: int32 [B, L] -> [B, L, D]."""
        return self.weight.map_rows(lambda part: part[tokens]).dense(self.dtype).data


Activation = Callable[[mx.array, mx.array], mx.array]


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up
