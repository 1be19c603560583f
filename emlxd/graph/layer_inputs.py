"""What each layer is told of the token itself, besides what the layers before it have made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from emlxd.graph.activations import Activation
from emlxd.graph.layers import Embedding, Linear, Norm

_OF_TWO: Final = 2**-0.5  # summands


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """As in Gemma 4: a table has a vector for each token and layer, a projection of the embedding another.

    ``width`` is the size of a layer's vector.
    """

    table: Embedding
    projection: Linear
    norm: Norm
    width: int

    def __call__(self, tokens: mx.array, embedded: mx.array) -> mx.array:
        """int32 [B, L] and their embeddings [B, L, D] -> [B, L, layers, width]"""
        looked_up = mx.unflatten(self.table(tokens) * self.width**0.5, -1, (-1, self.width))
        projected = self.projection(embedded) * embedded.shape[-1] ** -0.5
        return (self.norm(mx.unflatten(projected, -1, (-1, self.width))) + looked_up) * _OF_TWO


@dataclass(frozen=True, slots=True)
class InputGate:
    """How a layer takes up its vector: weighed by what is there already."""

    gate: Linear
    out: Linear
    norm: Norm
    activation: Activation

    def __call__(self, x: mx.array, own: mx.array) -> mx.array:
        """[B, L, D] and [B, L, width] -> [B, L, D]"""
        return x + self.norm(self.out(self.activation(self.gate(x), own)))
