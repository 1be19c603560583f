"""What layers keep of the tokens so far: allocated once at load, written in place, never grown."""

from __future__ import annotations

import mlx.core as mx

from emlxd.graph.spec import ModelSpec

WINDOW_STEP = 256

LayerArrays = list[list[mx.array]]
"""For each layer its arrays, in the order of ``ModelSpec.kept``, [slots, ...] each."""


class KVCache:
    """The arrays of all layers. ``layers`` holds them layer by layer, as the model takes and returns them."""

    def __init__(self, spec: ModelSpec, slots: int, max_context: int, dtype: mx.Dtype) -> None:
        self.layers = empty_layers(spec, slots, max_context, dtype)
        self._kept = [one for layer in spec.layers for one in spec.kept(layer, max_context)]
        self._max_context = max_context
        mx.eval(self.layers)

    @property
    def arrays(self) -> list[mx.array]:
        return [array for layer in self.layers for array in layer]

    @property
    def by_token(self) -> list[mx.array]:
        """Keys, values, latents: [slots, heads, max_context, dim] each."""
        return self._chosen(by_token=True)

    @property
    def states(self) -> list[mx.array]:
        """What stands for all tokens of a slot: [slots, ...] each."""
        return self._chosen(by_token=False)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def window(self, tokens: int) -> int:
        """How many positions attention looks at to cover ``tokens``: few sizes, so few traces."""
        window = WINDOW_STEP
        while window < tokens:
            window *= 2
        return min(window, self._max_context)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copies the first ``tokens`` positions of one slot to another, and its states as they are."""
        window = self.window(tokens)
        for array in self.by_token:
            array[target, :, :window] = array[source, :, :window]
        for array in self.states:
            array[target] = array[source]

    def _chosen(self, *, by_token: bool) -> list[mx.array]:
        pairs = zip(self.arrays, self._kept, strict=True)
        return [array for array, one in pairs if one.by_token == by_token]


def empty_layers(spec: ModelSpec, slots: int, max_context: int, dtype: mx.Dtype) -> LayerArrays:
    """Zeros in the shapes of ``ModelSpec.kept``, not evaluated."""
    return [
        [
            mx.zeros((slots, *one.shape), mx.float32 if one.exact else dtype)
            for one in spec.kept(layer, max_context)
        ]
        for layer in spec.layers
    ]
