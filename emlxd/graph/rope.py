"""Rotary position embeddings: the frequencies of each kind of scaling, and how they are applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import mlx.core as mx

from emlxd.errors import ModelFormatError
from emlxd.graph.spec import RopeSpec


class Rope(Protocol):
    """Rotates ``x`` [B, L, H, D]; row b's first token is at ``starts[b]`` (int32 [B])."""

    def at(self, starts: mx.array, length: int) -> Callable[[mx.array], mx.array]:
        """Prepares what all layers of one step share."""


def wavelengths(spec: RopeSpec) -> list[float]:
    """Radians are position / wavelength: one entry for each pair of dimensions, dims / 2 in all."""
    plain = [spec.base ** (2 * i / spec.dims) for i in range(spec.dims // 2)]
    scaling = spec.scaling or {}
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in _SCALINGS:
        raise ModelFormatError(
            f"rope scaling '{kind}' is not supported, supported are: {', '.join(_SCALINGS)}"
        )
    return _SCALINGS[kind](plain, scaling)


def _default(plain: list[float], _: Mapping[str, Any]) -> list[float]:
    return plain


def _linear(plain: list[float], scaling: Mapping[str, Any]) -> list[float]:
    return [wavelength * float(scaling["factor"]) for wavelength in plain]


def _factors(plain: list[float], scaling: Mapping[str, Any]) -> list[float]:
    return [wavelength * factor for wavelength, factor in zip(plain, scaling["factors"], strict=True)]


def _llama3(plain: list[float], scaling: Mapping[str, Any]) -> list[float]:
    """Long waves are stretched by ``factor``, short ones kept, those between blended (Llama 3.1's config)."""
    factor, context = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])

    def stretch(wavelength: float) -> float:
        turns = context / (2 * math.pi * wavelength)
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        return wavelength / ((1 - keep) / factor + keep)

    return [stretch(wavelength) for wavelength in plain]


_SCALINGS: Final[Mapping[str, Callable[[list[float], Mapping[str, Any]], list[float]]]] = {
    "default": _default,
    "linear": _linear,
    "factors": _factors,
    "llama3": _llama3,
}


class FusedRope:
    """``mx.fast.rope``: one kernel on a GPU."""

    def __init__(self, spec: RopeSpec) -> None:
        self._dims = spec.dims
        self._wavelengths = mx.array(wavelengths(spec), dtype=mx.float32)

    def at(self, starts: mx.array, length: int) -> Callable[[mx.array], mx.array]:
        def rotate(x: mx.array) -> mx.array:
            turned = mx.fast.rope(
                x.swapaxes(1, 2),
                self._dims,
                traditional=False,
                base=None,
                scale=1.0,
                offset=starts,
                freqs=self._wavelengths,
            )
            return turned.swapaxes(1, 2)

        return rotate


class TableRope:
    """Sines and cosines from a table: on a CPU ``mx.fast.rope`` computes them anew in every layer."""

    def __init__(self, spec: RopeSpec, max_context: int) -> None:
        self._half = spec.dims // 2
        positions = mx.arange(max_context, dtype=mx.float32)
        angles = positions[:, None] / mx.array(wavelengths(spec), dtype=mx.float32)
        self._cos, self._sin = mx.cos(angles), mx.sin(angles)
        mx.eval(self._cos, self._sin)

    def at(self, starts: mx.array, length: int) -> Callable[[mx.array], mx.array]:
        positions = starts[:, None] + mx.arange(length, dtype=mx.int32)
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]

        def rotate(x: mx.array) -> mx.array:
            half = self._half
            a, b = x[..., :half], x[..., half : 2 * half]
            turned = [a * cos - b * sin, b * cos + a * sin]
            if x.shape[-1] > 2 * half:
                turned.append(x[..., 2 * half :])
            return mx.concatenate(turned, axis=-1)

        return rotate
