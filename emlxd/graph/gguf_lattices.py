"""GGUF's smallest block formats: a number picks a point of a lattice, several weights at once.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, whose lattices are in
``gguf_lattices.npz``: int8 [points, 4 or 8]. [n, ...] below are n blocks of 256 weights. Every function gives
numbers uint8 [groups, size], scales and biases [groups, 1], with value = number * scale + bias.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import mlx.core as mx

_FILE: Final = Path(__file__).with_name("gguf_lattices.npz")
_MIDDLE: Final = 128  # added to signed numbers, so that they fit in a byte

Parts = tuple[mx.array, mx.array, mx.array]


def iq2_xxs(blocks: mx.array) -> Parts:
    words = blocks[:, 2:].view(mx.uint32).reshape(-1, 8, 2)
    points = blocks[:, 2:].reshape(-1, 8, 8)[..., :4]
    return _signed(
        "IQ2_XXS", points, _signs_of_seven(words[..., 1]), _half(blocks, 0) * _top(words[..., 1]) / 4
    )


def iq2_xs(blocks: mx.array) -> Parts:
    codes = blocks[:, 2:66].view(mx.uint16)
    scales = _half(blocks, 0) * (_nibbles(blocks[:, 66:]) + 0.5) / 4
    return _signed("IQ2_XS", codes & 511, _with_parity(codes >> 9), scales)


def iq2_s(blocks: mx.array) -> Parts:
    points = blocks[:, 2:34].astype(mx.uint16) | (_pieces(blocks[:, 66:74], 2) << 8)
    scales = _half(blocks, 0) * (_nibbles(blocks[:, 74:]) + 0.5) / 4
    return _signed("IQ2_S", points, blocks[:, 34:66], scales)


def iq3_xxs(blocks: mx.array) -> Parts:
    words = blocks[:, 66:].view(mx.uint32)
    return _signed("IQ3_XXS", blocks[:, 2:66], _signs_of_seven(words), _half(blocks, 0) * _top(words) / 2)


def iq3_s(blocks: mx.array) -> Parts:
    points = blocks[:, 2:66].astype(mx.uint16) | (_pieces(blocks[:, 66:74], 1) << 8)
    scales = _half(blocks, 0) * (1 + 2 * _nibbles(blocks[:, 106:]))
    return _signed("IQ3_S", points, blocks[:, 74:106], scales)


def iq1_s(blocks: mx.array) -> Parts:
    high = blocks[:, 34:].view(mx.uint16)
    points = blocks[:, 2:34].astype(mx.uint16).reshape(-1, 8, 4) | (_threes(high) << 8)
    scales = _half(blocks, 0) * (2 * ((high >> 12) & 7).astype(mx.float32) + 1)
    return _shifted(points, (high >> 15)[..., None], scales)


def iq1_m(blocks: mx.array) -> Parts:
    high = _pieces(blocks[:, 32:48], 4)
    words = blocks[:, 48:].view(mx.uint16)
    parts = (words >> 12) << mx.array([0, 4, 8, 12], dtype=mx.uint16)
    scale = parts.sum(axis=-1, keepdims=True).astype(mx.uint16).view(mx.float16).astype(mx.float32)
    scales = scale * (2 * _threes(words).reshape(-1, 16).astype(mx.float32) + 1)
    points = blocks[:, :32].astype(mx.uint16) | ((high & 7) << 8)
    return _shifted(points, high >> 3, scales)


def _signed(name: str, points: mx.array, signs: mx.array, scales: mx.array) -> Parts:
    """``signs`` are bytes, a bit for each weight; ``scales`` [n, groups]."""
    values = _lattice(name)[points].reshape(-1, 256)
    signed = mx.where(_bits(signs).reshape(-1, 256) == 1, -values, values)
    scales = scales.reshape(-1, 1)
    numbers = (signed.astype(mx.int16) + _MIDDLE).astype(mx.uint8)
    return numbers.reshape(scales.size, -1), scales, scales * -_MIDDLE


def _shifted(points: mx.array, down: mx.array, scales: mx.array) -> Parts:
    """Eighths: what is picked is -1, 0 or 1, and an eighth is added, or taken away where ``down`` is 1."""
    eighths = _lattice("IQ1_S")[points].astype(mx.int16) * 8 + (1 - 2 * down.astype(mx.int16))[..., None]
    scales = scales.reshape(-1, 1) / 8
    numbers = (eighths + _MIDDLE).astype(mx.uint8)
    return numbers.reshape(scales.size, -1), scales, scales * -_MIDDLE


def _lattice(name: str) -> mx.array:
    lattices: dict[str, mx.array] = mx.load(str(_FILE))  # type: ignore[assignment]
    return lattices[name]


def _half(blocks: mx.array, at: int) -> mx.array:
    """[n, 1]"""
    return blocks[:, at : at + 2].view(mx.float16).astype(mx.float32)


def _top(words: mx.array) -> mx.array:
    """The four highest bits, and a half."""
    return (words >> 28).astype(mx.float32) + 0.5


def _nibbles(data: mx.array) -> mx.array:
    """[n, k] -> float32 [n, 2k]: of each byte the low half, then the high one."""
    return _pieces(data, 4).astype(mx.float32)


def _pieces(data: mx.array, bits: int) -> mx.array:
    """[n, k] -> uint16 [n, k * 8 / bits]: each byte from its low end."""
    shifts = mx.arange(0, 8, bits, dtype=mx.uint16)
    pieces = (data.astype(mx.uint16)[..., None] >> shifts) & ((1 << bits) - 1)
    return pieces.reshape(data.shape[0], -1)


def _threes(words: mx.array) -> mx.array:
    """uint16 [n, k] -> [n, k, 4]: the lowest twelve bits, three by three."""
    return (words[..., None] >> mx.arange(0, 12, 3, dtype=mx.uint16)) & 7


def _bits(data: mx.array) -> mx.array:
    return (data[..., None] >> mx.arange(8, dtype=mx.uint8)) & 1


def _signs_of_seven(words: mx.array) -> mx.array:
    """uint32 [n, 8] -> bytes [n, 8, 4]: seven bits each."""
    return _with_parity((words[..., None] >> mx.array([0, 7, 14, 21], dtype=mx.uint32)) & 127)


def _with_parity(seven: mx.array) -> mx.array:
    """The eighth sign makes the number of negative ones even."""
    bits = seven.astype(mx.uint8)
    return bits | ((_bits(bits).sum(axis=-1).astype(mx.uint8) & 1) << 7)
