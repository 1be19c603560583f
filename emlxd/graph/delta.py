"""What adapters make of a projection: x W^T + x A^T B^T, with A and B those of each row's adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from emlxd.graph.weights import Weight


class Chosen:
    """Which adapter each row of the forward at hand has: int32 [B], 0 for none; None if no row has any.

    One for all projections of a model, set before each forward. In a compiled one it is an input.
    """

    rows: mx.array | None = None


@dataclass(frozen=True, slots=True)
class LowRank:
    """One adapter's part for a projection: A [..., r, in] and B [..., out, r], scaled.

    With a ``magnitude`` [out] (DoRA, https://arxiv.org/abs/2402.09353) the rows of W + B A get these lengths.
    """

    a: mx.array
    b: mx.array
    magnitude: mx.array | None = None

    def growth(self, weight: mx.array) -> mx.array:
        """By which share of itself each output grows, float32 [out]; ``weight`` is float32 [out, in]."""
        if self.magnitude is None:
            return mx.zeros((weight.shape[0],))
        adapted = weight + self.b.astype(mx.float32) @ self.a.astype(mx.float32)
        return self.magnitude.astype(mx.float32) / mx.linalg.norm(adapted, axis=1) - 1


@dataclass(frozen=True, slots=True)
class Delta:
    """A [n, r, in] and B [n, out, r] of n adapters, scaled. Of experts [n, experts, ...] each.

    ``growth`` [n, out], where an adapter has a magnitude: by which share of itself all but the bias grows.
    """

    a: mx.array
    b: mx.array
    chosen: Chosen
    growth: mx.array | None = None

    def adapted(self, x: mx.array, y: mx.array, bias: mx.array | None) -> mx.array:
        """What becomes of y = x W^T + bias, [B, L, out], for x [B, L, in]. Rows without an adapter stay."""
        adapters = self.chosen.rows
        if adapters is None:
            return y
        at = mx.maximum(adapters - 1, 0)
        added = self._added(x, at, adapters)
        if self.growth is None:
            return y + added
        growth = _masked(self.growth[at][:, None], adapters)
        bare = y if bias is None else y - bias
        return y + added + growth * (bare + added)

    def _added(self, x: mx.array, at: mx.array, adapters: mx.array) -> mx.array:
        if x.shape[1] == 1:
            return _gathered(x, self.a, self.b, at, adapters)
        # CUDA gathers for vectors alone; here the copies of A and B serve many tokens.
        inner = _masked(x @ self.a[at].swapaxes(-1, -2), adapters)
        return inner @ self.b[at].swapaxes(-1, -2)

    def of_experts(self, x: mx.array, experts: mx.array, rows: mx.array) -> mx.array | None:
        """[..., 1, in] -> [..., 1, out] for one expert each, int [...], and the row that each belongs to."""
        if self.chosen.rows is None:
            return None
        adapters = self.chosen.rows[rows]
        at = mx.maximum(adapters - 1, 0) * self.a.shape[1] + experts
        return _gathered(x, self.a.flatten(0, 1), self.b.flatten(0, 1), at, adapters)

    def with_outputs(self, outputs: mx.array) -> Delta:
        """For some of the outputs, or all in another order."""
        growth = None if self.growth is None else self.growth[:, outputs]
        return Delta(self.a, self.b[..., outputs, :], self.chosen, growth)


def _gathered(x: mx.array, a: mx.array, b: mx.array, at: mx.array, adapters: mx.array) -> mx.array:
    """For vectors [..., 1, in]."""
    inner = _masked(mx.gather_mm(x, a.swapaxes(-1, -2), rhs_indices=at), adapters)
    return mx.gather_mm(inner, b.swapaxes(-1, -2), rhs_indices=at)


def _masked(inner: mx.array, adapters: mx.array) -> mx.array:
    """Zeros where there is no adapter."""
    return mx.where((adapters > 0)[..., None, None], inner, 0)


def stack_deltas(
    parts: Sequence[LowRank | None], dtype: mx.Dtype, chosen: Chosen, weight: Weight | None = None
) -> Delta | None:
    """From the part of each adapter, None where it has none. ``weight`` is needed where there are magnitudes.

    Smaller ranks are filled with zeros, which change nothing.
    """
    present = [part for part in parts if part is not None]
    if not present:
        return None
    nothing = LowRank(present[0].a[..., :0, :], present[0].b[..., :0])
    every = [part or nothing for part in parts]
    rank = max(part.a.shape[-2] for part in every)
    padded = [_padded(part, rank) for part in every]
    a, b = (mx.stack([pair[side] for pair in padded]).astype(dtype) for side in (0, 1))
    growth = None
    if weight is not None and any(part.magnitude is not None for part in every):
        dense = weight.dense(mx.float32).data
        growth = mx.stack([part.growth(dense) for part in every]).astype(dtype)
    return Delta(a, b, chosen, growth)


def _padded(part: LowRank, rank: int) -> tuple[mx.array, mx.array]:
    none = [(0, 0)] * (part.a.ndim - 2)
    room = (0, rank - part.a.shape[-2])
    return mx.pad(part.a, [*none, room, (0, 0)]), mx.pad(part.b, [*none, (0, 0), room])


def join_deltas(deltas: Sequence[Delta | None], widths: Sequence[int]) -> Delta | None:
    """The delta of projections of one input that became one: A below each other, B in blocks.

    ``widths`` are the outputs of each.
    """
    present = [delta for delta in deltas if delta is not None]
    if not present:
        return None
    blocks, above = [], 0
    for delta, width in zip(deltas, widths, strict=True):
        if delta is not None:
            room = (above, sum(widths) - above - width)
            blocks.append(mx.pad(delta.b, [*[(0, 0)] * (delta.b.ndim - 2), room, (0, 0)]))
        above += width
    a = mx.concatenate([delta.a for delta in present], axis=-2)
    growth = None
    if any(delta.growth is not None for delta in present):
        found = [
            mx.zeros((a.shape[0], width), a.dtype) if delta is None or delta.growth is None else delta.growth
            for delta, width in zip(deltas, widths, strict=True)
        ]
        growth = mx.concatenate(found, axis=-1)
    return Delta(a, mx.concatenate(blocks, axis=-1), present[0].chosen, growth)
