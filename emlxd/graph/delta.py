"""What adapters add to a projection: x A B, with A and B those of each row's adapter."""

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
    """A [n, in, r] and B [n, r, out] of all adapters, scaled; number 0 is zeros, for rows without one."""

    a: mx.array
    b: mx.array
    chosen: Chosen

    def __call__(self, x: mx.array) -> mx.array | None:
        """[B, L, in] -> [B, L, out]"""
        rows = self.chosen.rows
        if rows is None:
            return None
        return mx.gather_mm(mx.gather_mm(x, self.a, rhs_indices=rows), self.b, rhs_indices=rows)

    def with_outputs(self, outputs: mx.array) -> Delta:
        """For some of the outputs, or all in another order."""
        return Delta(self.a, self.b[..., outputs], self.chosen)


def stack_deltas(
    parts: Sequence[tuple[mx.array, mx.array] | None], shape: tuple[int, int], dtype: mx.Dtype, chosen: Chosen
) -> Delta:
    """From A [in, r] and B [r, out] of each adapter, None where it has none, for a projection of ``shape``.

    Smaller ranks are filled with zeros, which change nothing.
    """
    rank = max(a.shape[1] for a, _ in filter(None, parts))
    (out, size) = shape
    none = mx.zeros((size, rank), dtype), mx.zeros((rank, out), dtype)

    def padded(part: tuple[mx.array, mx.array] | None) -> tuple[mx.array, mx.array]:
        if part is None:
            return none
        a, b = part
        room = (0, rank - a.shape[1])
        return mx.pad(a.astype(dtype), [(0, 0), room]), mx.pad(b.astype(dtype), [room, (0, 0)])

    pairs = [none, *map(padded, parts)]
    return Delta(mx.stack([a for a, _ in pairs]), mx.stack([b for _, b in pairs]), chosen)


def join_deltas(deltas: Sequence[Delta | None], widths: Sequence[int]) -> Delta | None:
    """The delta of projections of one input that became one: A side by side, B in blocks.

    ``widths`` are the outputs of each.
    """
    present = [delta for delta in deltas if delta is not None]
    if not present:
        return None
    blocks, left = [], 0
    for delta, width in zip(deltas, widths, strict=True):
        if delta is not None:
            blocks.append(mx.pad(delta.b, [(0, 0), (0, 0), (left, sum(widths) - left - width)]))
        left += width
    a = mx.concatenate([delta.a for delta in present], axis=-1)
    return Delta(a, mx.concatenate(blocks, axis=1), present[0].chosen)
