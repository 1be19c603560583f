"""The decode step: one token for each running slot, compiled once per shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from emlxd.graph.attention import Place
from emlxd.graph.sampling import SamplingArrays, SamplingMode, sample
from emlxd.graph.transformer import Transformer


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a trace depends on, and nothing else: rows, attention window and sampling stages."""

    rows: int
    window: int
    mode: SamplingMode


class DecodeSteps:
    """The decode step in every shape asked for so far, each traced once."""

    def __init__(self, model: Transformer, *, compile: bool) -> None:
        self._model = model
        self._compile = compile
        self._steps: dict[StepShape, Callable[..., list[mx.array]]] = {}
        self.traces = 0

    def __call__(
        self,
        shape: StepShape,
        tokens: mx.array,
        positions: mx.array,
        sampling: SamplingArrays,
        keys: list[mx.array],
        values: list[mx.array],
    ) -> mx.array:
        """tokens int32 [slots], positions int32 [rows] -> tokens int32 [slots] with the first rows replaced.

        ``keys`` and ``values`` are replaced in place: nothing else may hold the old arrays when the result
        is evaluated, or each would be copied.
        """
        step = self._steps.get(shape)
        if step is None:
            step = self._steps[shape] = self._build(shape)
        out = step(tokens, positions, *sampling.list(), *keys, *values)
        layers = len(keys)
        keys[:] = out[1 : 1 + layers]
        values[:] = out[1 + layers :]
        return out[0]

    def _build(self, shape: StepShape) -> Callable[..., list[mx.array]]:
        model = self._model

        def step(tokens: mx.array, positions: mx.array, *rest: mx.array) -> list[mx.array]:
            self.traces += 1
            sampling, cache = SamplingArrays(*rest[:5]), list(rest[5:])
            keys, values = cache[: len(cache) // 2], cache[len(cache) // 2 :]
            place = Place(slice(0, shape.rows), positions, 1, shape.window)
            hidden = model.forward(tokens[: shape.rows, None], place, keys, values)
            chosen = sample(model.logits(hidden[:, 0]), positions, sampling, shape.mode)
            return [mx.concatenate([chosen, tokens[shape.rows :]]), *keys, *values]

        return mx.compile(step) if self._compile else step
