"""Convolutions over a few tokens, with the last inputs as their state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from emlxd.graph.activations import Functions
from emlxd.graph.layers import Linear
from emlxd.graph.step_context import StepContext


@dataclass(frozen=True, slots=True)
class CausalConv:
    """Each channel for itself, over a token and those before it: ``weights`` are ``width`` of [channels]."""

    weights: tuple[mx.array, ...]
    bias: mx.array | None
    functions: Functions

    def __call__(self, x: mx.array, step: StepContext, state: mx.array) -> mx.array:
        """[B, L, channels] -> float32 of the same shape.

        ``state`` [slots, width - 1, channels] holds the inputs before.
        """
        return step.advance(state, lambda before, lengths: self._run(x, before, lengths))

    def _run(self, x: mx.array, before: mx.array, lengths: mx.array | None) -> tuple[mx.array, mx.array]:
        length, width = x.shape[1], len(self.weights)
        inputs = mx.concatenate([before, x], axis=1)
        out = self.functions.weigh([inputs[:, back : back + length] for back in range(width)], self.weights)
        if self.bias is not None:
            out = out + self.bias
        if lengths is None or length == 1:
            return out, inputs[:, length:]
        last = lengths[:, None] + mx.arange(width - 1, dtype=mx.int32)
        return out, mx.take_along_axis(inputs, last[..., None], axis=1)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """LFM2's layer: a convolution between two gates, all three made of the same input."""

    inputs: Linear
    conv: CausalConv
    out: Linear

    def __call__(self, x: mx.array, step: StepContext, kept: Sequence[mx.array]) -> mx.array:
        (state,) = kept
        before, after, x = mx.split(self.inputs(x), 3, axis=-1)
        return self.out(after * self.conv(before * x, step, state).astype(x.dtype))
