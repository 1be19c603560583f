"""A matrix as a checkpoint stores it, dense or quantised, and what is done to it while loading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Quantization:
    """The parameters of MLX's quantised formats (``mx.quantize``)."""

    group_size: int = 64
    bits: int = 4
    mode: str = "affine"


@dataclass(frozen=True, slots=True)
class ExpandFrom:
    """From how many rows on a product is faster if what is quantised is expanded first.

    ``matrix`` rows of a single matrix, ``expert`` rows of each of a stack, on average.
    """

    matrix: int
    expert: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a checkpoint. With ``scales`` it is quantised, and ``data`` is packed uint32.

    Products of ``expand_from`` rows and more, of a whole stack if it is one, expand it first.
    """

    data: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    quantization: Quantization | None = None
    expand_from: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values, whatever they are packed in."""
        if self.quantization is None:
            return tuple(self.data.shape)
        return (*self.data.shape[:-1], self.data.shape[-1] * 32 // self.quantization.bits)

    def times(self, x: mx.array) -> mx.array:
        """x W^T for a matrix [out, in]: [..., in] -> [..., out]"""
        q = self.quantization
        if q is None or self.scales is None:
            return x @ self.data.T
        if self.expands(x.size // x.shape[-1]):
            return x @ self.dense(x.dtype).data.T
        return mx.quantized_matmul(
            x, self.data, self.scales, self.biases, group_size=q.group_size, bits=q.bits, mode=q.mode
        )

    def expands(self, rows: int) -> bool:
        """Whether a product of so many rows is one with the expanded values."""
        return self.expand_from is not None and rows >= self.expand_from

    def dense(self, dtype: mx.Dtype) -> Weight:
        """The same values, not quantised, in ``dtype``."""
        w = self.astype(dtype)
        if w.quantization is None or w.scales is None:
            return w
        q = w.quantization
        data = mx.dequantize(w.data, w.scales, w.biases, group_size=q.group_size, bits=q.bits, mode=q.mode)
        return Weight(data.astype(dtype))

    def astype(self, dtype: mx.Dtype) -> Weight:
        """Casts what is floating point: a dense tensor, or the scales of an affine quantised one."""
        if self.quantization is None:
            return Weight(self.data.astype(dtype))
        if self.quantization.mode != "affine":
            return self
        return self.map_rows(lambda part: part if part.dtype == mx.uint32 else part.astype(dtype))

    def map_rows(self, change: Callable[[mx.array], mx.array]) -> Weight:
        """Applies a change that treats output rows alike (a permutation, a slice) to every part."""
        return replace(
            self,
            data=change(self.data),
            scales=None if self.scales is None else change(self.scales),
            biases=None if self.biases is None else change(self.biases),
        )

    def arrays(self) -> list[mx.array]:
        return [part for part in (self.data, self.scales, self.biases) if part is not None]


def fuse_rows(weights: Sequence[Weight]) -> Weight | None:
    """Puts matrices of equal input width below each other, or None when their formats differ."""
    if any(weight.quantization != weights[0].quantization for weight in weights):
        return None
    return _join(weights, lambda parts: mx.concatenate(parts, axis=-2))


def stack(weights: Sequence[Weight]) -> Weight:
    """[n, ...] from n weights of one shape; dense where their formats differ."""
    if any(weight.quantization != weights[0].quantization for weight in weights):
        weights = [weight.dense(mx.float32) for weight in weights]
    return _join(weights, mx.stack)


def _join(weights: Sequence[Weight], join: Callable[[list[mx.array]], mx.array]) -> Weight:
    scales = [weight.scales for weight in weights if weight.scales is not None]
    biases = [weight.biases for weight in weights if weight.biases is not None]
    return replace(
        weights[0],
        data=join([weight.data for weight in weights]),
        scales=join(scales) if scales else None,
        biases=join(biases) if biases else None,
    )


def quantize(weight: Weight, quantization: Quantization) -> Weight:
    """A dense weight in MLX's format; the last axis must divide into groups."""
    q = quantization
    data, scales, *biases = mx.quantize(weight.data, group_size=q.group_size, bits=q.bits, mode=q.mode)
    return Weight(data, scales, biases[0] if biases else None, q)


def from_fp8(data: mx.array, scales: mx.array, block: int = 128) -> Weight:
    """Hugging Face's fp8: e4m3 bytes [rows, columns] and one factor for each block x block of them."""
    rows, columns = data.shape
    values = mx.from_fp8(data, dtype=mx.float32)
    factors = mx.repeat(mx.repeat(scales.astype(mx.float32), block, axis=0), block, axis=1)
    return Weight((values * factors[:rows, :columns]).astype(mx.bfloat16))
