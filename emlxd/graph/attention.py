"""Attention over the static cache: write this step's keys and values, then look at a window of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from emlxd.graph.cpu_math import exp


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
    def mask(self) -> mx.array:
        """bool [B, 1, L, window]: a token sees itself and what came before it."""
        return mx.arange(self.window, dtype=mx.int32) <= self.positions[:, None, :, None]


# (q [B, H, L, d], k [B, Hk, W, d], v [B, Hk, W, d], scale, mask [B, 1, L, W]) -> [B, H, L, d]
Attend = Callable[[mx.array, mx.array, mx.array, float, mx.array], mx.array]


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


def fused_attention(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array) -> mx.array:
    """q [B, H, L, d], k and v [B, Hk, W, d], mask bool [B, 1, L, W] -> [B, H, L, d], in one kernel."""
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


def cpu_attention(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array) -> mx.array:
    """The same from plain operations, for a CPU.

    Query heads that share a key head become rows of one matmul, and the sum of the weights divides the
    small result instead of the large weights.
    """
    batch, heads, length, dim = q.shape
    shared = k.shape[1]
    q = (q * scale).reshape(batch, shared, -1, dim)
    scores = (q @ k.swapaxes(-1, -2)).reshape(batch, shared, heads // shared, length, -1)
    scores = mx.where(mask[:, :, None], scores, -1e30)
    weights = exp(scores - scores.max(axis=-1, keepdims=True))
    out = weights.reshape(batch, shared, -1, weights.shape[-1]) @ v
    out = out.reshape(batch, heads, length, dim)
    return out / weights.sum(axis=-1, keepdims=True).reshape(batch, heads, length, 1)
