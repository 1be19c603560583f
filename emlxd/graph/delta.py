"""What adapters add to a projection: x A^T B^T, with A and B those of each row's adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


class Chosen:
    """Which adapter each row of the forward at hand has: int32 [B], 0 for none; None if no row has any.

    One for all projections of a model, set before each forward. In a compiled one it is an input.
    """

    rows: mx.array | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """A [n, r, in] and B [n, out, r] of n adapters, scaled. Of experts [n, experts, ...] each."""

    a: mx.array
    b: mx.array
    chosen: Chosen

    def __call__(self, x: mx.array) -> mx.array | None:
        """[B, L, in] -> [B, L, out]; None if there is nothing to add."""
        adapters = self.chosen.rows
        if adapters is None:
            return None
        at = mx.maximum(adapters - 1, 0)
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
        return Delta(self.a, self.b[..., outputs, :], self.chosen)


def _gathered(x: mx.array, a: mx.array, b: mx.array, at: mx.array, adapters: mx.array) -> mx.array:
    """For vectors [..., 1, in]."""
    inner = _masked(mx.gather_mm(x, a.swapaxes(-1, -2), rhs_indices=at), adapters)
    return mx.gather_mm(inner, b.swapaxes(-1, -2), rhs_indices=at)


def _masked(inner: mx.array, adapters: mx.array) -> mx.array:
    """Zeros where there is no adapter."""
    return mx.where((adapters > 0)[..., None, None], inner, 0)


def stack_deltas(
    parts: Sequence[tuple[mx.array, mx.array] | None], dtype: mx.Dtype, chosen: Chosen
) -> Delta | None:
    """From A [..., r, in] and B [..., out, r] of each adapter, None where it has none.

    Smaller ranks are filled with zeros, which change nothing.
    """
    present = [part for part in parts if part is not None]
    if not present:
        return None
    rank = max(a.shape[-2] for a, _ in present)
    nothing = present[0][0][..., :0, :], present[0][1][..., :0]
    padded = [_padded(part or nothing, rank) for part in parts]
    a, b = (mx.stack([pair[side] for pair in padded]).astype(dtype) for side in (0, 1))
    return Delta(a, b, chosen)


def _padded(part: tuple[mx.array, mx.array], rank: int) -> tuple[mx.array, mx.array]:
    a, b = part
    none = [(0, 0)] * (a.ndim - 2)
    room = (0, rank - a.shape[-2])
    return mx.pad(a, [*none, room, (0, 0)]), mx.pad(b, [*none, (0, 0), room])


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
    return Delta(a, mx.concatenate(blocks, axis=-1), present[0].chosen)
