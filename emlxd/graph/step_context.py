"""What the layers of one forward share: made when the first of them asks, used by all."""

from __future__ import annotations

import mlx.core as mx

from emlxd.graph.attention import Attention, Place, Scoring
from emlxd.graph.rope import Rope, Rotate
from emlxd.graph.spec import ModelSpec


class StepContext:
    """Place, masks and rotations of one forward."""

    def __init__(self, spec: ModelSpec, place: Place, attention: Attention) -> None:
        self.place = place
        self._attention = attention
        self._masks: dict[int | None, mx.array] = {}
        self._rotations: dict[int, Rotate] = {}
        self.query_scale = _query_scale(spec, place)

    def rotate(self, rope: Rope, x: mx.array) -> mx.array:
        """Rotates [B, L, H, D] to its positions."""
        if id(rope) not in self._rotations:
            self._rotations[id(rope)] = rope.at(self.place.starts, self.place.length)
        return self._rotations[id(rope)](x)

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
        if back not in self._masks:
            self._masks[back] = self._attention.mask(self.place, back)
        return self._attention(q, k, v, self._masks[back], scoring, bias)


def _query_scale(spec: ModelSpec, place: Place) -> mx.array | None:
    """float32 [B, L, 1, 1], or None"""
    if spec.position_scale is None:
        return None
    beta, length = spec.position_scale
    return (1 + beta * mx.log(1 + mx.floor(place.positions / length)))[:, :, None, None]
