"""A matrix as a checkpoint stores it, dense or quantised, and what is done to it while loading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from emlxd.graph.gguf import TensorInfo


@dataclass(frozen=True, slots=True)
class Quantization:
    """The parameters of MLX's quantised formats (``mx.quantize``)."""

    group_size: int = 64
    bits: int = 4
    mode: str = "affine"


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a checkpoint. With ``scales`` it is quantised: ``data`` is then packed uint32."""

    data: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    quantization: Quantization | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values, whatever they are packed in."""
        if self.quantization is None:
            return tuple(self.data.shape)
        return (*self.data.shape[:-1], self.data.shape[-1] * 32 // self.quantization.bits)

    def dense(self, dtype: mx.Dtype) -> Weight:
        """The same values, not quantised, in ``dtype``."""
        if self.quantization is None or self.scales is None:
            return Weight(self.data.astype(dtype))
        q = self.quantization
        data = mx.dequantize(
            self.data, self.scales, self.biases, group_size=q.group_size, bits=q.bits, mode=q.mode
        )
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
    """Stacks matrices of equal input width into one, or None when their formats differ."""
    first = weights[0]
    if any(weight.quantization != first.quantization for weight in weights):
        return None
    return Weight(
        mx.concatenate([weight.data for weight in weights]),
        None if first.scales is None else mx.concatenate([w.scales for w in weights if w.scales is not None]),
        None if first.biases is None else mx.concatenate([w.biases for w in weights if w.biases is not None]),
        first.quantization,
    )


def from_gguf(info: TensorInfo, raw: bytes) -> Weight:
    """A GGUF tensor as MLX stores the same values; block types map to affine groups of 32."""
    data = mx.array(memoryview(raw))  # type: ignore[arg-type]
    match info.block.name:
        case "F32":
            return Weight(data.view(mx.float32).reshape(info.shape))
        case "F16":
            return Weight(data.view(mx.float16).reshape(info.shape))
        case "BF16":
            return Weight(data.view(mx.bfloat16).reshape(info.shape))
    blocks = data.reshape(*info.shape[:-1], -1, info.block.bytes)
    scales = blocks[..., 0:2].view(mx.float16)
    match info.block.name:
        case "Q4_0":
            return _affine(_pack_nibbles(blocks[..., 2:]), scales, scales * -8, 4)
        case "Q4_1":
            return _affine(_pack_nibbles(blocks[..., 4:]), scales, blocks[..., 2:4].view(mx.float16), 4)
        case "Q8_0":
            return _affine(blocks[..., 2:] ^ 0x80, scales, scales * -128, 8)
    raise NotImplementedError(info.block.name)


def _affine(packed: mx.array, scales: mx.array, biases: mx.array, bits: int) -> Weight:
    """packed: [..., blocks, bytes a block] uint8; scales, biases: [..., blocks, 1]."""
    return Weight(
        mx.contiguous(packed.flatten(-2)).view(mx.uint32),
        scales.squeeze(-1),
        biases.squeeze(-1),
        Quantization(group_size=32, bits=bits),
    )


def _pack_nibbles(quants: mx.array) -> mx.array:
    """GGUF keeps weight j beside weight j + 16 in a byte; MLX keeps neighbours together."""
    weights = mx.concatenate([quants & 0x0F, quants >> 4], axis=-1)
    return weights[..., 0::2] | (weights[..., 1::2] << 4)
