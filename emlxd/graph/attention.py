"""Attention over the static cache: write this step's keys and values, then look at a window of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import mlx.core as mx

from emlxd.graph.cpu_math import exp

_HIDDEN: Final = -1e30  # finite, since a row that sees nothing must not become NaN


@dataclass(frozen=True, slots=True)
class Place:
    """Where the B x L tokens of one forward stand in the cache.

    ``rows`` are the B slots, as a slice when they are neighbours; ``starts`` int32 [B] the position of each
    row's first token. Attention looks at the first ``window`` positions.
    """

    rows: slice | mx.array
    starts: mx.array
    length: int
    window: int

    @property
    def positions(self) -> mx.array:
        """int32 [B, L]"""
        return self.starts[:, None] + mx.arange(self.length, dtype=mx.int32)

    @property
    def visible(self) -> mx.array:
        """bool [B, 1, L, window]: a token sees itself and what came before it."""
        return mx.arange(self.window, dtype=mx.int32) <= self.positions[:, None, :, None]


class Attention(Protocol):
    """How a device computes attention, and the form of mask that it does so with."""

    def mask(self, place: Place) -> mx.array:
        """What all layers of one forward share."""

    def __call__(self, q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array) -> mx.array:
        """q [B, H, L, d], k and v [B, Hk, window, d] -> [B, H, L, d]."""


def write(cache: mx.array, new: mx.array, place: Place) -> None:
    """Scatters ``new`` [B, H, L, head_dim] into ``cache`` [slots, H, max_context, head_dim], in place."""
    rows = place.rows
    if isinstance(rows, slice):
        rows = mx.arange(rows.start, rows.stop, dtype=mx.int32)
    heads = mx.arange(new.shape[1], dtype=mx.int32)
    cache[rows[:, None, None], heads[None, :, None], place.positions[:, None, :]] = new


def read(cache: mx.array, place: Place) -> mx.array:
    """The window that attention looks at, [B, H, window, head_dim]; a view when rows are neighbours."""
    return cache[place.rows, :, : place.window]


class FusedAttention:
    """MLX's own kernel."""

    def mask(self, place: Place) -> mx.array:
        """bool [B, 1, L, window]"""
        return place.visible

    def __call__(self, q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


class CpuAttention:
    """The same from plain float32 operations, for a CPU.

    Query heads that share a key head become rows of one matmul, and the sum of the weights divides the
    small result instead of the large weights.
    """

    def __init__(self, *, compile: bool) -> None:
        self._shifted_exp = mx.compile(_shifted_exp) if compile else _shifted_exp

    def mask(self, place: Place) -> mx.array:
        """float32 [B, 1, 1, L, window], to be added"""
        return mx.where(place.visible, 0.0, _HIDDEN)[:, None]

    def __call__(self, q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array) -> mx.array:
        batch, heads, length, dim = q.shape
        shared, window = k.shape[1], k.shape[2]
        rows = (batch, shared, heads // shared * length)
        scores = (q * scale).reshape(*rows, dim) @ k.swapaxes(-1, -2)
        scores = scores.reshape(batch, shared, heads // shared, length, window) + mask
        weights = self._shifted_exp(scores, scores.max(axis=-1, keepdims=True)).reshape(*rows, window)
        out = (weights @ v) / weights.sum(axis=-1, keepdims=True)
        return out.reshape(q.shape)


def _shifted_exp(scores: mx.array, shift: mx.array) -> mx.array:
    return exp(scores - shift)
