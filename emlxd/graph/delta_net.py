"""Gated delta net: linear attention whose state corrects itself and fades."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from emlxd.graph.activations import Functions
from emlxd.graph.layers import Linear, Norm, Parallel
from emlxd.graph.linear_scan import Tokens, scan
from emlxd.graph.recurrent_spec import DeltaNetSpec
from emlxd.graph.short_conv import CausalConv
from emlxd.graph.step_context import StepContext

_NORM_EPS = 1e-6  # of the length of queries and keys, added to its square


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """``inputs`` makes queries, keys, values, the gate of the output, and what becomes beta and the decay.

    The state before a token fades by exp(-``rate`` softplus(a + ``shift``)), float32 [value_heads] both.
    """

    spec: DeltaNetSpec
    inputs: Parallel
    conv: CausalConv
    rate: mx.array
    shift: mx.array
    norm: Norm
    out: Linear
    functions: Functions

    def __call__(self, x: mx.array, step: StepContext, kept: Sequence[mx.array]) -> mx.array:
        spec, (batch, length, _) = self.spec, x.shape
        conv_state, state = kept
        mixed = 2 * spec.keys + spec.values
        ends = [mixed, mixed + spec.values, mixed + spec.values + spec.value_heads]
        mixed_in, gate, beta, decay = mx.split(self.inputs(x), ends, axis=-1)
        mixed_out = self.functions.silu(self.conv(mixed_in, step, conv_state))
        qk, v = mx.split(mixed_out, [2 * spec.keys], axis=-1)
        q, k = mx.split(_unit(qk.reshape(batch, length, 2 * spec.key_heads, -1)), 2, axis=2)
        tokens = Tokens(
            q=q * spec.key_dim**-0.5,
            k=k,
            v=v.reshape(batch, length, spec.value_heads, -1),
            log_decay=-self.rate * mx.logaddexp(decay.astype(mx.float32) + self.shift, mx.array(0.0)),
            beta=mx.sigmoid(beta.astype(mx.float32)),
        )
        y = step.advance(
            state, lambda before, lengths: scan(tokens.first(lengths), before, self.functions.exp)
        )
        y = self.functions.swiglu(gate.reshape(y.shape).astype(mx.float32), self.norm(y))
        return self.out(y.astype(x.dtype).reshape(batch, length, -1))


def _unit(x: mx.array) -> mx.array:
    """Vectors of length 1."""
    dims = x.shape[-1]
    return mx.fast.rms_norm(x, None, _NORM_EPS / dims) * (1 / math.sqrt(dims))
