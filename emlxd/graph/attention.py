"""Attention over the static cache: write this step's keys and values, then look at a window of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import mlx.core as mx

from emlxd.graph.cpu_math import exp

SCORES: Final = 1 << 18  # that a CPU makes at a time: 1 MB, what its second-level cache holds
MIN_QUERIES: Final = 8
_HIDDEN: Final = -1e30  # finite, since a row that sees nothing must not become NaN


@dataclass(frozen=True, slots=True)
class Place:
    """Where the B x L tokens of one forward stand in the cache.

    ``rows`` are the B slots, as a slice when they are neighbours; ``starts`` int32 [B] the position of each
    row's first token. Attention looks at the first ``window`` positions. ``lengths`` int32 [B]: how many of
    a row's tokens there are, the others being padding; None for all. ``adapters`` int32 [B] as
    ``delta.Chosen`` has them. ``may_begin``: some row may be at the beginning of its sequence.
    """

    rows: slice | mx.array
    starts: mx.array
    length: int
    window: int
    lengths: mx.array | None = None
    adapters: mx.array | None = None
    may_begin: bool = True

    @property
    def positions(self) -> mx.array:
        """int32 [B, L]"""
        return self.starts[:, None] + mx.arange(self.length, dtype=mx.int32)

    def visible(self, back: int | None = None, size: int | None = None) -> mx.array:
        """bool [B, 1, L, size]: a token sees itself and the ``back`` - 1 tokens before it, or all of them.

        ``size`` is that of the window, unless what is looked at is a smaller ring.
        """
        size = size or self.window
        own, other = self.positions[:, None, :, None], mx.arange(size, dtype=mx.int32)
        if size < self.window:
            last = (self.starts + (self.length - 1))[:, None, None, None]
            other = last - (last - other) % size  # the position that lies at each place of the ring
            return (other >= 0) & (other <= own) & (other > own - (back or size))
        if back is None or back >= size:
            return other <= own
        return (other <= own) & (other > own - back)


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores become weights: their scale, a bound they approach (0 is none), and the sinks.

    ``sinks`` [H] are scores of one more key without a value, one a head.
    """

    scale: float
    soft_cap: float = 0.0
    sinks: mx.array | None = None


class Attention(Protocol):
    """How a device computes attention, and the form of mask that it does so with."""

    def mask(self, place: Place, back: int | None = None, size: int | None = None) -> mx.array:
        """What all layers of one forward share that look equally far back, at so many keys."""

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        mask: mx.array,
        scoring: Scoring,
        bias: mx.array | None = None,
    ) -> mx.array:
        """q [B, H, L, d], k [B, Hk, size, d], v [B, Hk, size, dv] -> [B, H, L, dv].

        ``bias`` [B, H, L, size] is added to the scores.
        """


def positions_within(starts: mx.array, length: int, size: int) -> mx.array:
    """Those of ``length`` tokens a row, below ``size``, int32 [B, L].

    MLX does not check indices, and padding may be past the end. It is at the last position then, which only
    the token there looks at, and no token comes after it.
    """
    positions = starts[:, None] + mx.arange(length, dtype=mx.int32)
    return positions if length == 1 else mx.minimum(positions, size - 1)


Cells = tuple[mx.array, mx.array, mx.array]
"""The indices of what a step writes of a cache [slots, H, positions, head_dim]: [B, H, L] together."""


def cells(place: Place, heads: int, size: int, ring: int | None = None) -> Cells:
    """Those of a step at ``place``, in a cache that keeps ``size`` positions, or a ring."""
    rows = place.rows
    if isinstance(rows, slice):
        rows = mx.arange(rows.start, rows.stop, dtype=mx.int32)
    at = positions_within(place.starts, place.length, size) if ring is None else _in_ring(place, ring)
    return rows[:, None, None], mx.arange(heads, dtype=mx.int32)[None, :, None], at[:, None, :]


def _in_ring(place: Place, ring: int) -> mx.array:
    """int32 [B, L]. Padding goes to the place that nobody reads: elsewhere it would overwrite a token."""
    at = place.positions % ring
    if place.lengths is None:
        return at
    return mx.where(mx.arange(place.length, dtype=mx.int32) < place.lengths[:, None], at, ring)


def read(cache: mx.array, place: Place, ring: int | None = None) -> mx.array:
    """What attention looks at, [B, H, size, head_dim]: the window, or the whole ring if that is smaller.

    A view when rows are neighbours.
    """
    return cache[place.rows, :, : min(place.window, ring or place.window)]


class FusedAttention:
    """MLX's own kernel, where it can: it knows no soft cap."""

    def mask(self, place: Place, back: int | None = None, size: int | None = None) -> mx.array:
        """bool [B, 1, L, size]"""
        return place.visible(back, size)

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        mask: mx.array,
        scoring: Scoring,
        bias: mx.array | None = None,
    ) -> mx.array:
        if scoring.soft_cap:
            return self._capped(q, k, v, mask, scoring)
        if bias is not None:
            mask = mx.where(mask, bias, mx.finfo(bias.dtype).min)
        return mx.fast.scaled_dot_product_attention(
            q, k, v, scale=scoring.scale, mask=mask, sinks=scoring.sinks
        )

    def _capped(self, q: mx.array, k: mx.array, v: mx.array, mask: mx.array, scoring: Scoring) -> mx.array:
        batch, heads, length, _ = q.shape
        q = (q * scoring.scale).reshape(batch, k.shape[1], -1, length, q.shape[-1])
        scores = q @ k[:, :, None].swapaxes(-1, -2)
        scores = scoring.soft_cap * mx.tanh(scores / scoring.soft_cap)
        scores = mx.where(mask[:, None], scores, mx.finfo(scores.dtype).min)
        out = mx.softmax(scores, axis=-1, precise=True) @ v[:, :, None]
        return out.reshape(batch, heads, length, v.shape[-1])


class CpuAttention:
    """The same from plain float32 operations, for a CPU.

    Query heads that share a key head become rows of one matmul, and the sum of the weights divides the
    small result instead of the large weights. Scores are made for some of the queries at a time, so that they
    stay in the processor's cache.
    """

    def __init__(self, *, compile: bool) -> None:
        self._shifted_exp = mx.compile(_shifted_exp) if compile else _shifted_exp

    def mask(self, place: Place, back: int | None = None, size: int | None = None) -> mx.array:
        """float32 [B, 1, 1, L, size], to be added"""
        return mx.where(place.visible(back, size), 0.0, _HIDDEN)[:, None]

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        mask: mx.array,
        scoring: Scoring,
        bias: mx.array | None = None,
    ) -> mx.array:
        batch, heads, length, dim = q.shape
        shared, window = k.shape[1], k.shape[2]
        size = max(MIN_QUERIES, SCORES // (batch * heads * window))
        if length > size:
            some = [slice(start, start + size) for start in range(0, length, size)]
            parts = [
                self(q[:, :, at], k, v, mask[..., at, :], scoring, None if bias is None else bias[:, :, at])
                for at in some
            ]
            return mx.concatenate(parts, axis=2)
        rows = (batch, shared, heads // shared * length)
        scores = (q * scoring.scale).reshape(*rows, dim) @ k.swapaxes(-1, -2)
        scores = scores.reshape(batch, shared, heads // shared, length, window)
        if scoring.soft_cap:
            scores = scoring.soft_cap * mx.tanh(scores / scoring.soft_cap)
        if bias is not None:
            scores = scores + bias.reshape(scores.shape)
        scores = scores + mask
        highest = scores.max(axis=-1, keepdims=True)
        if scoring.sinks is not None:
            sinks = scoring.sinks.reshape(shared, heads // shared, 1, 1)
            highest = mx.maximum(highest, sinks)
        weights = self._shifted_exp(scores, highest)
        total = weights.sum(axis=-1, keepdims=True)
        if scoring.sinks is not None:
            total = total + self._shifted_exp(sinks, highest)
        out = (weights.reshape(*rows, window) @ v).reshape(*total.shape[:-1], v.shape[-1]) / total
        return out.reshape(batch, heads, length, v.shape[-1])


def _shifted_exp(scores: mx.array, shift: mx.array) -> mx.array:
    return exp(scores - shift)
