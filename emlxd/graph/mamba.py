"""Mamba-2: a linear recurrence whose decay and whose steps depend on the token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from emlxd.graph.activations import Functions
from emlxd.graph.layers import Linear, Norm
from emlxd.graph.linear_scan import Tokens, scan
from emlxd.graph.recurrent_spec import MambaSpec
from emlxd.graph.short_conv import CausalConv
from emlxd.graph.step_context import StepContext


@dataclass(frozen=True, slots=True)
class Mamba:
    """``inputs`` makes the gate of the output, what goes through the convolution, and the times of steps.

    A step of time t fades the state by exp(-``rate`` t) and adds t x B^T; its output is that of C, and
    ``skip`` x. ``rate``, ``shift`` of the time and ``skip`` are float32 [heads].
    """

    spec: MambaSpec
    inputs: Linear
    conv: CausalConv
    rate: mx.array
    shift: mx.array
    skip: mx.array
    norm: Norm
    out: Linear
    functions: Functions

    def __call__(self, x: mx.array, step: StepContext, kept: Sequence[mx.array]) -> mx.array:
        spec, (batch, length, _) = self.spec, x.shape
        conv_state, state = kept
        gate, mixed, time = mx.split(self.inputs(x), [spec.values, spec.values + spec.channels], axis=-1)
        mixed = self.functions.silu(self.conv(mixed, step, conv_state))
        values, write, read = mx.split(mixed, [spec.values, (spec.values + spec.channels) // 2], axis=-1)
        values = values.reshape(batch, length, spec.heads, -1)
        time = mx.logaddexp(time.astype(mx.float32) + self.shift, mx.array(0.0))
        time = mx.clip(time, *spec.step_limits)
        tokens = Tokens(
            q=read.reshape(batch, length, spec.groups, -1),
            k=write.reshape(batch, length, spec.groups, -1),
            v=values * time[..., None],
            log_decay=-self.rate * time,
        )
        y = step.advance(
            state, lambda before, lengths: scan(tokens.first(lengths), before, self.functions.exp)
        )
        y = (y + values * self.skip[:, None]).reshape(batch, length, -1)
        y = self.norm(self.functions.swiglu(gate.astype(mx.float32), y))
        return self.out(y.astype(x.dtype))
