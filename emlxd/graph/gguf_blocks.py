"""GGUF's block formats, as MLX stores the same values."""

from __future__ import annotations

import mlx.core as mx

from emlxd.graph.gguf import TensorInfo
from emlxd.graph.weights import Quantization, Weight


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
