"""What layers keep of the tokens so far: allocated once at load, written in place, never grown."""

from __future__ import annotations

import mlx.core as mx

from emlxd.graph.spec import ModelSpec

WINDOW_STEP = 256

LayerArrays = list[list[mx.array]]
"""For each layer its arrays, in the order of ``ModelSpec.kept``, [slots, ...] each."""


class KVCache:
    """The arrays of all layers. ``layers`` holds them layer by layer, as the model takes and returns them.

    A step cannot write in place what it has read, and it reads a state before it writes it: if the states of
    all slots were one array, every step would copy all of them. So a step over the first slots gets arrays
    with the states of these alone.

    ``rings``: the size of the ring that each of ``by_token`` is, or None.
    """

    def __init__(self, spec: ModelSpec, slots: int, max_context: int, dtype: mx.Dtype) -> None:
        self.layers = empty_layers(spec, slots, max_context, dtype)
        kept = [(n, spec.kept(layer, max_context)) for n, layer in enumerate(spec.layers)]
        places = [(layer, index, one) for layer, parts in kept for index, one in enumerate(parts)]
        self._by_token = [(layer, index) for layer, index, one in places if one.by_token]
        self._states = [(layer, index) for layer, index, one in places if not one.by_token]
        self.rings = [one.ring for _, _, one in places if one.by_token]
        self._max_context = max_context
        self._slots = slots
        self._first = slots
        self._others: list[mx.array] = []  # states of the slots after the first ones

    @property
    def arrays(self) -> list[mx.array]:
        return [array for layer in self.layers for array in layer] + self._others

    @property
    def by_token(self) -> list[mx.array]:
        """Keys, values, latents: [slots, heads, max_context, dim] each, or fewer positions in a ring."""
        return [self.layers[layer][index] for layer, index in self._by_token]

    def states(self) -> list[mx.array]:
        """What stands for all tokens of a slot: [slots, ...] each, brought together."""
        self.give_states(self._slots)
        return [self.layers[layer][index] for layer, index in self._states]

    def states_of(self, slot: int) -> list[mx.array]:
        """Those of one slot: [...] each."""
        if slot >= self._first:
            self.give_states(self._slots)
        return [self.layers[layer][index][slot] for layer, index in self._states]

    def give_states(self, first: int) -> None:
        """Leaves in ``layers`` the states of the ``first`` slots, a row each, and sets the others aside."""
        if first == self._first:
            return
        at, others = mx.arange(self._slots), []
        for number, (layer, index) in enumerate(self._states):
            whole = self.layers[layer][index]
            if self._others:
                whole = mx.concatenate([whole, self._others[number]])
            if first < self._slots:
                others.append(whole[at[first:]])
                whole = whole[at[:first]]
            self.layers[layer][index] = whole
        self._first, self._others = first, others

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def window(self, tokens: int) -> int:
        """How many positions attention looks at to cover ``tokens``: few sizes, so few traces."""
        window = WINDOW_STEP
        while window < tokens:
            window *= 2
        return min(window, self._max_context)

    def exact_window(self, tokens: int) -> int:
        """The same for prefill, which is not traced: the next multiple, since every position costs time."""
        return min(-(-tokens // WINDOW_STEP) * WINDOW_STEP, self._max_context)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copies the first ``tokens`` positions of one slot to another, and rings and states as they are."""
        window = self.window(tokens)
        for array, ring in zip(self.by_token, self.rings, strict=True):
            size = min(window, ring or window)
            array[target, :, :size] = array[source, :, :size]
        for array in self.states():
            array[target] = array[source]


def empty_layers(spec: ModelSpec, slots: int, max_context: int, dtype: mx.Dtype) -> LayerArrays:
    """Zeros in the shapes of ``ModelSpec.kept``, not evaluated."""
    return [
        [
            mx.zeros((slots, *one.shape), mx.float32 if one.exact else dtype)
            for one in spec.kept(layer, max_context)
        ]
        for layer in spec.layers
    ]
