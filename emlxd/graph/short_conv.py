"""Convolutions over a few tokens, with the last inputs as their state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from emlxd.graph.layers import Linear
from emlxd.graph.step_context import StepContext


@dataclass(frozen=True, slots=True)
class CausalConv:
    """Each channel for itself, over a token and those before it: ``weight`` [width, channels]."""

    weight: mx.array
    bias: mx.array | None

    def __call__(self, x: mx.array, step: StepContext, state: mx.array) -> mx.array:
        """[B, L, channels] -> the same. ``state`` [slots, width - 1, channels] holds the inputs before."""
        return step.advance(state, lambda before, lengths: self._run(x, before, lengths))

    def _run(self, x: mx.array, before: mx.array, lengths: mx.array | None) -> tuple[mx.array, mx.array]:
        length, width = x.shape[1], self.weight.shape[0]
        inputs = mx.concatenate([before, x], axis=1)
        out = inputs[:, :length] * self.weight[0]
        for back in range(1, width):
            out = out + inputs[:, back : back + length] * self.weight[back]
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
        return self.out(after * self.conv(before * x, step, state))
