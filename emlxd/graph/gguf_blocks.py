"""GGUF's block formats: each comes apart into groups of small whole numbers with a scale and a bias.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h; [n, ...] below are n blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from emlxd.graph import gguf_lattices as lattices
from emlxd.graph.gguf import TensorInfo
from emlxd.graph.weights import Quantization, Weight, quantize

_NEAREST: Final = Quantization(group_size=32, bits=8)
_IQ4_VALUES: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4_HALVES: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_PLAIN: Final = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


KEPT_BITS: Final[Mapping[str, int]] = {
    "Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "IQ4_NL": 8, "IQ4_XS": 8,
    "Q2_K": 8, "Q3_K": 8, "Q4_K": 4, "Q5_K": 5, "Q6_K": 8,
    "IQ1_S": 8, "IQ1_M": 8, "IQ2_XXS": 8, "IQ2_XS": 8, "IQ2_S": 8, "IQ3_XXS": 8, "IQ3_S": 8,
    "MXFP4": 4, "TQ1_0": 8, "TQ2_0": 8,
}  # fmt: skip
"""Bits of a weight where the tensor is not made dense; its groups have 32 of them."""


@dataclass(frozen=True, slots=True)
class Groups:
    """value = number * scale + bias: ``numbers`` uint8 [groups, size] below 2^bits, the rest [groups, 1]."""

    numbers: mx.array
    scales: mx.array
    biases: mx.array
    bits: int


def from_gguf(info: TensorInfo, raw: bytes, dense: mx.Dtype | None = None) -> Weight:
    """A tensor as MLX stores the same values, or in the type ``dense``.

    MLX knows no groups of 16: such tensors become 8-bit groups of 32, which is close.
    """
    data = mx.array(memoryview(raw))  # type: ignore[arg-type]
    if plain := _PLAIN.get(info.block.name):
        return Weight(data.view(plain).reshape(info.shape).astype(dense or plain))
    blocks = data.reshape(-1, info.block.bytes)
    if info.block.name == "MXFP4" and dense is None:
        return _packed_mxfp4(blocks, info.shape)
    groups = _GROUPS_OF[info.block.name](blocks)
    exact = groups.numbers.shape[-1] == 32
    if dense is None and exact:
        return _packed(groups, info.shape)
    values = groups.numbers.astype(mx.float32) * groups.scales.astype(mx.float32)
    values = (values + groups.biases.astype(mx.float32)).reshape(info.shape)
    return Weight(values.astype(dense)) if dense else quantize(Weight(values), _NEAREST)


def _packed(groups: Groups, shape: tuple[int, ...]) -> Weight:
    numbers = groups.numbers
    match groups.bits:
        case 4:
            numbers = numbers[..., 0::2] | (numbers[..., 1::2] << 4)
        case 5:
            eights = numbers.reshape(*numbers.shape[:-1], -1, 8).astype(mx.uint64)
            joined = (eights << (5 * mx.arange(8, dtype=mx.uint64))).sum(axis=-1, keepdims=True)
            numbers = joined.astype(mx.uint64).view(mx.uint8)[..., :5]
    rows = shape[:-1]
    return Weight(
        mx.contiguous(numbers.reshape(*rows, -1)).view(mx.uint32),
        groups.scales.reshape(*rows, -1),
        groups.biases.reshape(*rows, -1),
        Quantization(group_size=32, bits=groups.bits),
    )


def _packed_mxfp4(blocks: mx.array, shape: tuple[int, ...]) -> Weight:
    """The same numbers and powers in MLX's order."""
    numbers = _nibbles(blocks[:, 1:])
    numbers = numbers[:, 0::2] | (numbers[:, 1::2] << 4)
    return Weight(
        mx.contiguous(numbers.reshape(*shape[:-1], -1)).view(mx.uint32),
        mx.contiguous(blocks[:, 0].reshape(*shape[:-1], -1)),
        None,
        Quantization(group_size=32, bits=4, mode="mxfp4"),
    )


def _f16(blocks: mx.array, at: int) -> mx.array:
    """[n, 1]"""
    return blocks[:, at : at + 2].view(mx.float16)


def _nibbles(data: mx.array) -> mx.array:
    """[..., k] -> [..., 2k]: all low halves, then all high ones."""
    return mx.concatenate([data & 0x0F, data >> 4], axis=-1)


def _fifth_bits(blocks: mx.array, at: int) -> mx.array:
    """[n, 32]: bit j of a 32-bit word, worth 16."""
    word = blocks[:, at : at + 4].view(mx.uint32)
    return (((word >> mx.arange(32, dtype=mx.uint32)) & 1) << 4).astype(mx.uint8)


def _q4_0(blocks: mx.array) -> Groups:
    scales = _f16(blocks, 0)
    return Groups(_nibbles(blocks[:, 2:]), scales, scales * -8, 4)


def _q4_1(blocks: mx.array) -> Groups:
    return Groups(_nibbles(blocks[:, 4:]), _f16(blocks, 0), _f16(blocks, 2), 4)


def _q5_0(blocks: mx.array) -> Groups:
    scales = _f16(blocks, 0)
    return Groups(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2), scales, scales * -16, 5)


def _q5_1(blocks: mx.array) -> Groups:
    return Groups(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), _f16(blocks, 0), _f16(blocks, 2), 5)


def _q8_0(blocks: mx.array) -> Groups:
    scales = _f16(blocks, 0).astype(mx.float32)
    return Groups(blocks[:, 2:] ^ 0x80, scales, scales * -128, 8)


def _two_bits(data: mx.array) -> mx.array:
    """[n, 64] -> [n, 2, 4, 32]: each half's 32 bytes hold four weights, 32 apart."""
    shifts = mx.array([0, 2, 4, 6], dtype=mx.uint8)[:, None]
    return (data.reshape(-1, 2, 1, 32) >> shifts) & 3


def _q2_k(blocks: mx.array) -> Groups:
    factors = blocks[:, :16]
    scale, lowest = (_f16(blocks, at).astype(mx.float32) for at in (80, 82))
    return Groups(
        _two_bits(blocks[:, 16:80]).reshape(-1, 16),
        (scale * (factors & 0x0F)).reshape(-1, 1),
        (-lowest * (factors >> 4)).reshape(-1, 1),
        2,
    )


def _q3_k(blocks: mx.array) -> Groups:
    high = (blocks[:, None, :32] >> mx.arange(8, dtype=mx.uint8)[:, None]) & 1
    numbers = _two_bits(blocks[:, 32:96]) | (high.reshape(-1, 2, 4, 32) << 2)
    low = _nibbles(blocks[:, 96:104])
    pairs = (blocks[:, None, 104:108] >> mx.array([0, 2, 4, 6], dtype=mx.uint8)[:, None]) & 3
    factors = (low | (pairs.reshape(-1, 16) << 4)).astype(mx.float32) - 32
    scales = (_f16(blocks, 108).astype(mx.float32) * factors).reshape(-1, 1)
    return Groups(numbers.reshape(-1, 16), scales, scales * -4, 3)


def _k_scales(blocks: mx.array) -> tuple[mx.array, mx.array]:
    """Scales and biases [8n, 1] of eight groups, 6 bits each, from bytes 4 to 16 of Q4_K and Q5_K."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    factors = mx.concatenate([first & 63, (third & 0x0F) | ((first >> 6) << 4)], axis=-1)
    lowest = mx.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    scales = _f16(blocks, 0).astype(mx.float32) * factors
    biases = -_f16(blocks, 2).astype(mx.float32) * lowest
    return scales.reshape(-1, 1), biases.reshape(-1, 1)


def _q4_k(blocks: mx.array) -> Groups:
    return Groups(_nibbles(blocks[:, 16:].reshape(-1, 32)).reshape(-1, 32), *_k_scales(blocks), 4)


def _q5_k(blocks: mx.array) -> Groups:
    low = _nibbles(blocks[:, 48:].reshape(-1, 32)).reshape(-1, 8, 32)
    high = (blocks[:, None, 16:48] >> mx.arange(8, dtype=mx.uint8)[:, None]) & 1
    return Groups((low | (high << 4)).reshape(-1, 32), *_k_scales(blocks), 5)


def _q6_k(blocks: mx.array) -> Groups:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    numbers = low | (_two_bits(blocks[:, 128:192]) << 4)
    factors = blocks[:, 192:208].view(mx.int8).astype(mx.float32)
    scales = (_f16(blocks, 208).astype(mx.float32) * factors).reshape(-1, 1)
    return Groups(numbers.reshape(-1, 16), scales, scales * -32, 6)


def _ternary(numbers: mx.array, blocks: mx.array, at: int) -> Groups:
    """[n, 256] of 0, 1 and 2, which stand for -1, 0 and 1 times one scale."""
    scales = mx.repeat(_f16(blocks, at).astype(mx.float32), 8, axis=0)
    return Groups(numbers.reshape(-1, 32), scales, -scales, 8)


def _tq1_0(blocks: mx.array) -> Groups:
    """A byte is a fraction of 256 with five digits in base 3, the last four bytes have four."""
    parts = ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4))
    digits = [
        (part[:, None] * mx.array([[3**i] for i in range(count)], dtype=mx.uint8)).flatten(1)
        for part, count in parts
    ]
    numbers = (mx.concatenate(digits, axis=-1).astype(mx.uint16) * 3) >> 8
    return _ternary(numbers.astype(mx.uint8), blocks, 52)


def _tq2_0(blocks: mx.array) -> Groups:
    return _ternary(_two_bits(blocks[:, :64]), blocks, 64)


def _iq4(nibbles: mx.array, scales: mx.array) -> Groups:
    """Each number picks one of sixteen values between -128 and 127."""
    values = mx.array([value + 128 for value in _IQ4_VALUES], dtype=mx.uint8)
    return Groups(values[nibbles], scales, scales * -128, 8)


def _iq4_nl(blocks: mx.array) -> Groups:
    return _iq4(_nibbles(blocks[:, 2:]), _f16(blocks, 0).astype(mx.float32))


def _iq4_xs(blocks: mx.array) -> Groups:
    high = (blocks[:, 2:4].view(mx.uint16) >> mx.arange(0, 16, 2, dtype=mx.uint16)) & 3
    low = mx.stack([blocks[:, 4:8] & 0x0F, blocks[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    factors = (low | (high << 4)).astype(mx.float32) - 32
    scales = (_f16(blocks, 0).astype(mx.float32) * factors).reshape(-1, 1)
    return _iq4(_nibbles(blocks[:, 8:].reshape(-1, 16)), scales)


def _mxfp4(blocks: mx.array) -> Groups:
    """Sixteen values between -6 and 6, held as halves, times a power of two that is a float's exponent."""
    values = mx.array([value + 12 for value in _MXFP4_HALVES], dtype=mx.uint8)
    power = blocks[:, :1].astype(mx.uint32)
    bits = mx.where(power < 2, mx.array(0x200000, mx.uint32) << power, (power - 1) << 23)
    scales = bits.view(mx.float32)
    return Groups(values[_nibbles(blocks[:, 1:])], scales, scales * -12, 8)


_GROUPS_OF: Final[Mapping[str, Callable[[mx.array], Groups]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "IQ1_S": lambda blocks: Groups(*lattices.iq1_s(blocks), 8),
    "IQ1_M": lambda blocks: Groups(*lattices.iq1_m(blocks), 8),
    "IQ2_XXS": lambda blocks: Groups(*lattices.iq2_xxs(blocks), 8),
    "IQ2_XS": lambda blocks: Groups(*lattices.iq2_xs(blocks), 8),
    "IQ2_S": lambda blocks: Groups(*lattices.iq2_s(blocks), 8),
    "IQ3_XXS": lambda blocks: Groups(*lattices.iq3_xxs(blocks), 8),
    "IQ3_S": lambda blocks: Groups(*lattices.iq3_s(blocks), 8),
}
