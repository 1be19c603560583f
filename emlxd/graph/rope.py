"""Rotary position embeddings: the frequencies of each kind of scaling, and how they are applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import mlx.core as mx

from emlxd.graph.attention import positions_within
from emlxd.graph.spec import RopeSpec

Rotate = Callable[[mx.array], mx.array]


class Rope(Protocol):
    """Rotates ``x`` [B, L, H, D]; row b's first token is at ``starts[b]`` (int32 [B])."""

    def at(self, starts: mx.array, length: int) -> Rotate:
        """Prepares what all layers of one step share."""


@dataclass(frozen=True, slots=True)
class Waves:
    """An angle in radians is position / length. Each pair of dimensions has a length, dims / 2 of them.

    What is rotated is also multiplied by ``magnitude``.
    """

    lengths: list[float]
    magnitude: float = 1.0


def waves(spec: RopeSpec, max_context: int) -> Waves:
    """The waves of a context of ``max_context`` tokens. Raises KeyError or ValueError for a bad scaling."""
    plain = [spec.base ** (2 * i / spec.dims) for i in range(spec.dims // 2)]
    scaling = spec.scaling or {}
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in _SCALINGS:
        raise ValueError(f"rope scaling '{kind}', supported are {', '.join(_SCALINGS)}")
    return _SCALINGS[kind](plain, scaling, spec, max_context)


def _default(plain: list[float], *_: Any) -> Waves:
    return Waves(plain)


def _linear(plain: list[float], scaling: Mapping[str, Any], *_: Any) -> Waves:
    return Waves([length * float(scaling["factor"]) for length in plain])


def _factors(plain: list[float], scaling: Mapping[str, Any], *_: Any) -> Waves:
    return Waves([length * factor for length, factor in zip(plain, scaling["factors"], strict=True)])


def _llama3(plain: list[float], scaling: Mapping[str, Any], *_: Any) -> Waves:
    """Long waves are stretched by ``factor``, short ones kept, those between blended (Llama 3.1's config)."""
    factor = float(scaling["factor"])
    context = float(scaling.get("original_max_position_embeddings", 8192))
    low, high = float(scaling.get("low_freq_factor", 1.0)), float(scaling.get("high_freq_factor", 4.0))

    def stretch(length: float) -> float:
        turns = context / (2 * math.pi * length)
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        return length / ((1 - keep) / factor + keep)

    return Waves([stretch(length) for length in plain])


def _yarn(plain: list[float], scaling: Mapping[str, Any], spec: RopeSpec, _: int) -> Waves:
    """YaRN: waves that turn often are kept, those that turn seldom stretched, by a ramp over dimensions."""
    factor = float(scaling["factor"])
    context = float(scaling.get("original_max_position_embeddings", 4096))

    def dimension(turns: float) -> float:
        return spec.dims * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(spec.base))

    low, high = dimension(float(scaling.get("beta_fast", 32))), dimension(float(scaling.get("beta_slow", 1)))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dims - 1)
    span = (high - low) or 0.001

    def stretch(index: int, length: float) -> float:
        stretched = min(max((index - low) / span, 0.0), 1.0)
        return length / (stretched / factor + 1 - stretched)

    magnitude = yarn_magnitude(factor, float(scaling.get("mscale", 1)))
    magnitude /= yarn_magnitude(factor, float(scaling.get("mscale_all_dim", 0)))
    return Waves([stretch(index, length) for index, length in enumerate(plain)], magnitude)


def yarn_magnitude(factor: float, scale: float) -> float:
    """How much sharper attention must be over a context ``factor`` times as long."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(plain: list[float], scaling: Mapping[str, Any], spec: RopeSpec, max_context: int) -> Waves:
    """One list of factors for contexts of the original length, another for longer ones."""
    original = int(scaling["original_max_position_embeddings"])
    long = max_context > original
    factors = scaling["long_factor" if long else "short_factor"]
    growth = spec.max_position / original
    usual = math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0
    magnitude = scaling.get("long_mscale" if long else "short_mscale") or usual
    return Waves([length * factor for length, factor in zip(plain, factors, strict=True)], magnitude)


def _proportional(plain: list[float], scaling: Mapping[str, Any], spec: RopeSpec, _: int) -> Waves:
    """The first waves of all dimensions as they are; the others do not turn."""
    turning = int(spec.dims * float(scaling.get("partial_rotary_factor", 1.0))) // 2
    factor = float(scaling.get("factor", 1.0))
    return Waves([factor * length for length in plain[:turning]] + [math.inf] * (len(plain) - turning))


_SCALINGS: Final[Mapping[str, Callable[..., Waves]]] = {
    "default": _default,
    "linear": _linear,
    "mrope": _default,  # differs only for pictures, which have two more positions
    "dynamic": _default,  # differs only beyond max_position_embeddings, where no context reaches
    "factors": _factors,
    "llama3": _llama3,
    "yarn": _yarn,
    "deepseek_yarn": _yarn,
    "telechat3-yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
    "su": _longrope,
}


class FusedRope:
    """``mx.fast.rope``: one kernel on a GPU. ``turns`` float32 [dims / 2] are radians a position."""

    def __init__(self, spec: RopeSpec, max_context: int) -> None:
        self._spec = spec
        found = waves(spec, max_context)
        self._lengths = mx.array(found.lengths, dtype=mx.float32)
        self.turns = 1 / self._lengths
        self.magnitude = found.magnitude

    def turns_halves(self, head_dim: int) -> bool:
        """Whether all of a head is rotated, dimension i with i + head_dim / 2."""
        return self._spec.dims == head_dim and not self._spec.traditional

    def at(self, starts: mx.array, length: int) -> Rotate:
        def rotate(x: mx.array) -> mx.array:
            turned = mx.fast.rope(
                self._scaled(x).swapaxes(1, 2),
                self._spec.dims,
                traditional=self._spec.traditional,
                base=None,
                scale=1.0,
                offset=starts,
                freqs=self._lengths,
            )
            return turned.swapaxes(1, 2)

        return rotate

    def _scaled(self, x: mx.array) -> mx.array:
        dims = self._spec.dims
        if self.magnitude == 1.0:
            return x
        if x.shape[-1] == dims:
            return x * self.magnitude
        return mx.concatenate([x[..., :dims] * self.magnitude, x[..., dims:]], axis=-1)


class TableRope:
    """Sines and cosines from a table: on a CPU ``mx.fast.rope`` computes them anew in every layer."""

    def __init__(self, spec: RopeSpec, max_context: int) -> None:
        self._spec = spec
        found = waves(spec, max_context)
        positions = mx.arange(max_context, dtype=mx.float32)
        angles = positions[:, None] / mx.array(found.lengths, dtype=mx.float32)
        self._cos, self._sin = mx.cos(angles) * found.magnitude, mx.sin(angles) * found.magnitude
        mx.eval(self._cos, self._sin)

    def at(self, starts: mx.array, length: int) -> Rotate:
        positions = positions_within(starts, length, len(self._cos))
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        dims = self._spec.dims

        def rotate(x: mx.array) -> mx.array:
            rest = [x[..., dims:]] if x.shape[-1] > dims else []
            if self._spec.traditional:
                a, b = x[..., 0:dims:2], x[..., 1:dims:2]
                turned = mx.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).flatten(-2)
                return mx.concatenate([turned, *rest], axis=-1) if rest else turned
            a, b = x[..., : dims // 2], x[..., dims // 2 : dims]
            return mx.concatenate([a * cos - b * sin, b * cos + a * sin, *rest], axis=-1)

        return rotate
