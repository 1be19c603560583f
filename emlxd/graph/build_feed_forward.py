"""Builds feed-forward layers from a checkpoint: plain and gated ones, and mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from emlxd.graph.activations import Activation
from emlxd.graph.delta import Delta, join_deltas
from emlxd.graph.layers import Mlp, Norm, Parallel, fuse
from emlxd.graph.moe import ExpertLinear, Experts, Moe, MoeBeside
from emlxd.graph.spec import ExpertsSpec, LayerSpec, ModelSpec
from emlxd.graph.taker import Taker
from emlxd.graph.weights import fuse_rows, stack


def build_feed_forward(
    take: Taker, spec: ModelSpec, layer: LayerSpec, prefix: str, activation: Activation
) -> Mlp | Moe | MoeBeside:
    """That of the layer called ``prefix``."""
    experts, stem = layer.experts, f"{prefix}.mlp"
    if experts is None:
        return _mlp(take, spec, stem, layer.width, activation)
    moe = _moe(take, spec, experts, stem, activation)
    return _beside(take, spec, layer, prefix, moe, activation) if experts.beside else moe


def _beside(
    take: Taker, spec: ModelSpec, layer: LayerSpec, prefix: str, moe: Moe, activation: Activation
) -> MoeBeside:
    def norm(place: str) -> Norm:
        return take.norm(f"{prefix}.{place}", spec.norm, spec.hidden_size)

    scale = take.vector(f"{prefix}.mlp.router_scale", spec.hidden_size)
    return MoeBeside(
        plain=_mlp(take, spec, f"{prefix}.mlp", layer.width, activation),
        plain_in=norm("mlp_in"),
        plain_out=norm("plain_out"),
        moe=moe,
        router_in=Norm(spec.norm, scale * spec.hidden_size**-0.5),
        experts_in=norm("experts_in"),
        experts_out=norm("experts_out"),
        expert_scale=take.vector(f"{prefix}.mlp.expert_scale", moe.spec.count, dtype=mx.float32),
    )


def _mlp(take: Taker, spec: ModelSpec, prefix: str, width: int, activation: Activation) -> Mlp:
    """The gate and the linear part become one, whether or not they are stored so."""
    hidden, bias = spec.hidden_size, spec.mlp_bias
    if spec.gated and take.has(f"{prefix}.gate_up_proj.weight"):
        gate_up = Parallel((take.linear(f"{prefix}.gate_up_proj", 2 * width, hidden, bias),))
    else:
        names = ("gate_proj", "up_proj") if spec.gated else ("up_proj",)
        gate_up = fuse([take.linear(f"{prefix}.{name}", width, hidden, bias) for name in names])
    down = take.linear(f"{prefix}.down_proj", hidden, width, bias)
    return Mlp(take.evaluated(gate_up), down, activation, spec.gated)


def _moe(take: Taker, spec: ModelSpec, experts: ExpertsSpec, prefix: str, activation: Activation) -> Moe:
    count, hidden = experts.count, spec.hidden_size
    router = take.linear(f"{prefix}.router", count, hidden, experts.router_bias, quantize_dense=False)
    shared = None
    if experts.shared_width:
        shared = _mlp(take, spec, f"{prefix}.shared_experts", experts.shared_width, activation)
    return Moe(
        spec=experts,
        router=router,
        correction=_correction(take, experts, prefix),
        experts=take.evaluated(
            Experts.of(
                _gate_up(take, spec, experts, prefix),
                _projection(take, experts, prefix, "down_proj", hidden, experts.width),
                activation,
                experts.chosen,
            )
        ),
        shared=shared,
        shared_gate=take.linear(f"{prefix}.shared_expert_gate", 1, hidden) if experts.shared_gate else None,
    )


def _correction(take: Taker, experts: ExpertsSpec, prefix: str) -> mx.array | None:
    name = f"{prefix}.correction.e_score_correction_bias"
    if experts.correction is False or (experts.correction is None and not take.has(name)):
        return None
    return take.vector(name, experts.count, dtype=mx.float32, row=True)


def _gate_up(take: Taker, spec: ModelSpec, experts: ExpertsSpec, prefix: str) -> tuple[ExpertLinear, ...]:
    width, hidden, names = experts.width, spec.hidden_size, ("gate_proj", "up_proj")
    if take.has(f"{prefix}.stacked.gate_up_proj.weight"):
        fused = _projection(take, experts, prefix, "gate_up_proj", 2 * width, hidden)
        fused = _deinterleaved(fused) if experts.interleaved else fused
        deltas = [_delta(take, experts, prefix, name, width, hidden) for name in names]
        return (take.evaluated(replace(fused, delta=join_deltas(deltas, [width, width]))),)
    gate, up = (_projection(take, experts, prefix, name, width, hidden) for name in names)
    weight = fuse_rows([gate.weight, up.weight])
    if weight is None:
        return gate, up
    bias = None if gate.bias is None or up.bias is None else mx.concatenate([gate.bias, up.bias], axis=-1)
    delta = join_deltas([gate.delta, up.delta], [width, width])
    return (take.evaluated(ExpertLinear(weight, bias, delta)),)


def _projection(
    take: Taker, experts: ExpertsSpec, prefix: str, name: str, rows: int, columns: int
) -> ExpertLinear:
    """One projection of all experts, stored as one tensor or as one for each."""
    stem, each = _stems(experts, prefix, name)
    delta = _delta(take, experts, prefix, name, rows, columns)
    if take.has(f"{each[0]}.weight"):
        weight = take.evaluated(stack([take.matrix(stem, rows, columns) for stem in each]))
        bias = mx.stack([take.vector(f"{stem}.bias", rows) for stem in each]) if experts.bias else None
        return ExpertLinear(take.for_products(weight), bias, delta)
    weight = take.matrix(stem, experts.count, rows, columns)
    bias = take.vector(f"{stem}.bias", experts.count, rows) if experts.bias else None
    return ExpertLinear(take.for_products(weight), bias, delta)


def _delta(
    take: Taker, experts: ExpertsSpec, prefix: str, name: str, rows: int, columns: int
) -> Delta | None:
    stem, each = _stems(experts, prefix, name)
    return take.expert_delta(each, stem, rows, columns)


def _stems(experts: ExpertsSpec, prefix: str, name: str) -> tuple[str, list[str]]:
    """What a projection of all experts is called, and that of each."""
    return f"{prefix}.stacked.{name}", [f"{prefix}.experts.{index}.{name}" for index in range(experts.count)]


def _deinterleaved(fused: ExpertLinear) -> ExpertLinear:
    """The gate's rows first, then those of the linear part. The checkpoint stores them by turns."""

    def reorder(part: mx.array, axis: int) -> mx.array:
        pairs = mx.unflatten(part, axis, (-1, 2))
        return mx.contiguous(mx.moveaxis(pairs, axis, axis - 1).flatten(axis - 1, axis))

    weight = fused.weight.map_rows(lambda part: reorder(part, -2))
    return ExpertLinear(weight, None if fused.bias is None else reorder(fused.bias, -1))
