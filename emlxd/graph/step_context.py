"""What the layers of one forward share: made when the first of them asks, used by all."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from emlxd.graph.attention import Attention, Cells, Place, Scoring, cells
from emlxd.graph.rope import Rope, Rotate
from emlxd.graph.spec import ModelSpec

Run = Callable[[mx.array, mx.array | None], tuple[mx.array, mx.array]]
"""From a state [B, ...] before this step's tokens to their output [B, L, ...] and the state after the first
``lengths`` of each row, int32 [B], or after all."""

Advance = Callable[[mx.array], None]
"""Takes a state over the first ``lengths`` tokens of each row."""


class StepContext:
    """Place, masks, rotations and cells of one forward; ``later`` as in ``Transformer.forward``."""

    def __init__(
        self, spec: ModelSpec, place: Place, attention: Attention, later: list[Advance] | None = None
    ) -> None:
        self.place = place
        self._later = later
        self._attention = attention
        self._masks: dict[tuple[int | None, int], mx.array] = {}
        self._rotations: dict[int, Rotate] = {}
        self._cells: dict[tuple[int, int, int | None], Cells] = {}
        self.query_scale = _query_scale(spec, place)

    def rotate(self, rope: Rope, x: mx.array) -> mx.array:
        """Rotates [B, L, H, D] to its positions."""
        if id(rope) not in self._rotations:
            self._rotations[id(rope)] = rope.at(self.place.starts, self.place.length)
        return self._rotations[id(rope)](x)

    def write(self, cache: mx.array, new: mx.array, ring: int | None = None) -> None:
        """Scatters ``new`` [B, H, L, head_dim] into ``cache`` [slots, H, positions, head_dim], in place."""
        key = new.shape[1], cache.shape[2], ring
        if key not in self._cells:
            self._cells[key] = cells(self.place, *key)
        cache[self._cells[key]] = new

    def attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        back: int | None,
        scoring: Scoring,
        bias: mx.array | None = None,
    ) -> mx.array:
        """Attention of tokens to themselves and ``back`` - 1 tokens before, or to all; see ``Attention``."""
        key = back, k.shape[2]
        if key not in self._masks:
            self._masks[key] = self._attention.mask(self.place, *key)
        return self._attention(q, k, v, self._masks[key], scoring, bias)

    def advance(self, state: mx.array, run: Run) -> mx.array:
        """Takes a layer's ``state`` [slots, ...] over this step's tokens, and gives what ``run`` puts out.

        A sequence begins with zeros, and a row without tokens keeps what it has, so that nobody has to
        reset a slot or to keep others' steps off it.
        """
        kept = state[self.place.rows]
        before = kept
        if self.place.may_begin:
            before = mx.where(_per_row(self.place.starts == 0, kept), mx.zeros((), kept.dtype), kept)

        def write(after: mx.array, lengths: mx.array | None) -> None:
            after = after.astype(kept.dtype)
            if lengths is not None:
                after = mx.where(_per_row(lengths > 0, kept), after, kept)
            state[self.place.rows] = after

        if self._later is None:
            out, after = run(before, self.place.lengths)
            write(after, self.place.lengths)
            return out
        self._later.append(lambda lengths: write(run(before, lengths)[1], lengths))
        return run(before, None)[0]


def _per_row(condition: mx.array, like: mx.array) -> mx.array:
    """[B] -> [B, 1, ...], to choose between arrays like ``like``."""
    return condition.reshape(-1, *[1] * (like.ndim - 1))


def _query_scale(spec: ModelSpec, place: Place) -> mx.array | None:
    """float32 [B, L, 1, 1], or None"""
    if spec.position_scale is None:
        return None
    beta, length = spec.position_scale
    return (1 + beta * mx.log(1 + mx.floor(place.positions / length)))[:, :, None, None]
