"""The static KV cache: allocated once at load, written by position, never grown."""

from __future__ import annotations

import mlx.core as mx

from emlxd.graph.spec import ModelSpec

WINDOW_STEP = 256


class KVCache:
    """Keys and values of every layer, in the shapes of ``ModelSpec.cache_shape``."""

    def __init__(self, spec: ModelSpec, slots: int, max_context: int, dtype: mx.Dtype) -> None:
        keys, values = spec.cache_shape(slots, max_context)
        self.keys = [mx.zeros(keys, dtype) for _ in spec.layers]
        self.values = [mx.zeros(values, dtype) for _ in spec.layers]
        self._max_context = max_context
        mx.eval(self.keys, self.values)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.keys, *self.values))

    def window(self, tokens: int) -> int:
        """How many positions attention looks at to cover ``tokens``: few sizes, so few traces."""
        window = WINDOW_STEP
        while window < tokens:
            window *= 2
        return min(window, self._max_context)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copies the first ``tokens`` positions of one slot to another."""
        window = self.window(tokens)
        for layer in (*self.keys, *self.values):
            layer[target, :, :window] = layer[source, :, :window]
