"""Builds layers with a recurrent state from a checkpoint."""

from __future__ import annotations

import mlx.core as mx

from emlxd.graph.recurrent_spec import RecurrentSpec, ShortConvSpec
from emlxd.graph.short_conv import CausalConv, ShortConv
from emlxd.graph.spec import ModelSpec
from emlxd.graph.taker import Taker
from emlxd.graph.transformer import Mixer


def build_recurrent(take: Taker, spec: ModelSpec, recurrent: RecurrentSpec, layer: str) -> Mixer:
    """The part of ``layer``, such as ``model.layers.0``, that stands in the place of attention."""
    return _short_conv(take, spec, recurrent, f"{layer}.conv")


def _short_conv(take: Taker, spec: ModelSpec, conv: ShortConvSpec, prefix: str) -> ShortConv:
    hidden, channels = spec.hidden_size, conv.channels
    return ShortConv(
        inputs=take.linear(f"{prefix}.in_proj", 3 * channels, hidden, conv.bias),
        conv=_conv(take, f"{prefix}.conv", channels, conv.width, conv.bias),
        out=take.linear(f"{prefix}.out_proj", hidden, channels, conv.bias),
    )


def _conv(take: Taker, stem: str, channels: int, width: int, bias: bool) -> CausalConv:
    weight = mx.contiguous(take.kernel(stem, channels, width).T)
    return take.evaluated(CausalConv(weight, take.vector(f"{stem}.bias", channels) if bias else None))
