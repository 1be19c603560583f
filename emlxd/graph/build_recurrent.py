"""Builds layers with a recurrent state from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import mlx.core as mx

from emlxd.graph.activations import Functions
from emlxd.graph.delta_net import DeltaNet
from emlxd.graph.layers import Parallel, fuse
from emlxd.graph.mamba import Mamba
from emlxd.graph.recurrent_spec import DeltaNetSpec, MambaSpec, RecurrentSpec, ShortConvSpec
from emlxd.graph.short_conv import CausalConv, ShortConv
from emlxd.graph.spec import ModelSpec, NormSpec
from emlxd.graph.taker import Taker
from emlxd.graph.transformer import Mixer


def build_recurrent(
    take: Taker, spec: ModelSpec, recurrent: RecurrentSpec, layer: str, functions: Functions
) -> Mixer:
    """The part of ``layer``, such as ``model.layers.0``, that stands in the place of attention."""
    match recurrent:
        case ShortConvSpec():
            return _short_conv(take, spec, recurrent, f"{layer}.conv", functions)
        case DeltaNetSpec():
            return _delta_net(take, spec, recurrent, f"{layer}.linear_attn", functions)
        case MambaSpec():
            return _mamba(take, spec, recurrent, f"{layer}.mamba", functions)


def _short_conv(
    take: Taker, spec: ModelSpec, conv: ShortConvSpec, prefix: str, functions: Functions
) -> ShortConv:
    hidden, channels = spec.hidden_size, conv.channels
    return ShortConv(
        inputs=take.linear(f"{prefix}.in_proj", 3 * channels, hidden, conv.bias),
        conv=_conv(take, f"{prefix}.conv", channels, conv.width, conv.bias, functions),
        out=take.linear(f"{prefix}.out_proj", hidden, channels, conv.bias),
    )


def _delta_net(
    take: Taker, spec: ModelSpec, net: DeltaNetSpec, prefix: str, functions: Functions
) -> DeltaNet:
    heads = net.value_heads
    return DeltaNet(
        spec=net,
        inputs=_delta_inputs(take, spec, net, prefix),
        conv=_conv(take, f"{prefix}.conv1d", 2 * net.keys + net.values, net.width, False, functions),
        rate=take.evaluated(mx.exp(take.vector(f"{prefix}.A_log", heads, dtype=mx.float32))),
        shift=take.vector(f"{prefix}.dt_bias", heads, dtype=mx.float32),
        norm=take.norm(f"{prefix}.norm", NormSpec(spec.norm.eps), net.value_dim, dtype=mx.float32),
        out=take.linear(f"{prefix}.out_proj", spec.hidden_size, net.values),
        functions=functions,
    )


def _delta_inputs(take: Taker, spec: ModelSpec, net: DeltaNetSpec, prefix: str) -> Parallel:
    """Rows of queries, keys, values and gates, then those of beta and of the decay."""
    hidden, heads = spec.hidden_size, net.value_heads
    if not net.grouped:
        rows = (("qkv", 2 * net.keys + net.values), ("z", net.values), ("b", heads), ("a", heads))
        parts = [take.linear(f"{prefix}.in_proj_{name}", count, hidden) for name, count in rows]
        return take.evaluated(fuse(parts))
    shared = heads // net.key_heads
    sizes = (net.key_dim, net.key_dim, shared * net.value_dim, shared * net.value_dim)
    wide = take.linear(f"{prefix}.in_proj_qkvz", 2 * net.keys + 2 * net.values, hidden)
    narrow = take.linear(f"{prefix}.in_proj_ba", 2 * heads, hidden)
    return take.evaluated(
        fuse(
            [
                wide.with_rows(_by_kind(net.key_heads, sizes)),
                narrow.with_rows(_by_kind(net.key_heads, (shared, shared))),
            ]
        )
    )


def _by_kind(groups: int, sizes: Sequence[int]) -> mx.array:
    """Where rows stand that are stored group by group, each with ``sizes`` rows of every kind."""
    rows = mx.arange(groups * sum(sizes)).reshape(groups, -1)
    ends = list(accumulate(sizes))[:-1]
    return mx.concatenate([part.flatten() for part in mx.split(rows, ends, axis=1)])


def _mamba(take: Taker, spec: ModelSpec, mamba: MambaSpec, prefix: str, functions: Functions) -> Mamba:
    heads, rows = mamba.heads, mamba.values + mamba.channels + mamba.heads
    return Mamba(
        spec=mamba,
        inputs=take.linear(f"{prefix}.in_proj", rows, spec.hidden_size, mamba.bias),
        conv=_conv(take, f"{prefix}.conv1d", mamba.channels, mamba.width, mamba.conv_bias, functions),
        rate=take.evaluated(mx.exp(take.vector(f"{prefix}.A_log", heads, dtype=mx.float32))),
        shift=take.vector(f"{prefix}.dt_bias", heads, dtype=mx.float32),
        skip=take.vector(f"{prefix}.D", heads, dtype=mx.float32),
        norm=take.norm(f"{prefix}.norm", NormSpec(spec.norm.eps), mamba.values, dtype=mx.float32),
        out=take.linear(f"{prefix}.out_proj", spec.hidden_size, mamba.values, mamba.bias),
        functions=functions,
    )


def _conv(take: Taker, stem: str, channels: int, width: int, bias: bool, functions: Functions) -> CausalConv:
    weights = tuple(mx.contiguous(part) for part in take.kernel(stem, channels, width).T)
    vector = take.vector(f"{stem}.bias", channels) if bias else None
    return take.evaluated(CausalConv(weights, vector, functions))
