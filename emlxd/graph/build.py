"""Builds the parts of a layer from a checkpoint, as its ``ModelSpec`` says."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from emlxd.graph.activations import Functions
from emlxd.graph.attention import Scoring
from emlxd.graph.build_feed_forward import build_feed_forward
from emlxd.graph.build_recurrent import build_recurrent
from emlxd.graph.latent_attention import LatentAttention, Queries
from emlxd.graph.layer_inputs import InputGate, LayerInputs
from emlxd.graph.layers import Embedding, HeadNorm, Norm, Parallel, fuse
from emlxd.graph.rope import Rope
from emlxd.graph.self_attention import AllHeadsNorm, BorrowingAttention, SelfAttention
from emlxd.graph.spec import LatentSpec, LayerSpec, ModelSpec, NormSpec
from emlxd.graph.taker import Taker
from emlxd.graph.transformer import Layer, Mixer


def build_layer(
    take: Taker, spec: ModelSpec, layer: LayerSpec, index: int, rope: Rope | None, functions: Functions
) -> Layer:
    """Layer ``index``; ``rope`` is made from ``layer.rope``."""
    prefix = f"model.layers.{index}"

    def norm(place: str) -> Norm | None:
        if place not in spec.norm_places or (place == "mlp_in" and layer.experts and layer.experts.beside):
            return None
        return take.norm(f"{prefix}.{place}", spec.norm, spec.hidden_size)

    return Layer(
        mixer=(
            build_recurrent(take, spec, layer.recurrent, prefix, functions)
            if layer.recurrent
            else _attention(take, spec, layer, f"{prefix}.self_attn", rope)
        ),
        feed_forward=build_feed_forward(take, spec, layer, prefix, functions.activation),
        attention_in=norm("attention_in"),
        attention_out=norm("attention_out"),
        mlp_in=norm("mlp_in"),
        mlp_out=norm("mlp_out"),
        parallel=spec.parallel,
        residual_scale=spec.residual_scale,
        input_gate=_input_gate(take, spec, prefix, functions) if spec.layer_inputs else None,
        scale=take.vector(f"{prefix}.layer_scalar", 1) if spec.layer_scale else None,
    )


def build_layer_inputs(take: Taker, spec: ModelSpec) -> LayerInputs | None:
    """What the layers are told of the tokens themselves, if they are told anything."""
    width = spec.layer_inputs
    if not width:
        return None
    rows = len(spec.layers) * width
    table = take.matrix("model.embed_tokens_per_layer", spec.layer_vocab_size, rows)
    return LayerInputs(
        table=Embedding(table, take.dtype),
        projection=take.linear("model.per_layer_model_projection", rows, spec.hidden_size),
        norm=take.norm("model.per_layer_projection_norm", spec.norm, width),
        width=width,
    )


def _input_gate(take: Taker, spec: ModelSpec, prefix: str, functions: Functions) -> InputGate:
    return InputGate(
        gate=take.linear(f"{prefix}.per_layer_input_gate", spec.layer_inputs, spec.hidden_size),
        out=take.linear(f"{prefix}.per_layer_projection", spec.hidden_size, spec.layer_inputs),
        norm=take.norm(f"{prefix}.post_per_layer_input_norm", spec.norm, spec.hidden_size),
        activation=functions.activation,
    )


def _attention(take: Taker, spec: ModelSpec, layer: LayerSpec, prefix: str, rope: Rope | None) -> Mixer:
    if spec.latent and rope:
        return _latent_attention(take, spec, spec.latent, prefix, rope)
    sinks = take.vector(f"{prefix}.sinks", spec.heads) if spec.sinks else None
    scoring = Scoring(spec.attention_scale, spec.attention_soft_cap, sinks)
    width = spec.heads * layer.head_dim
    out = take.linear(f"{prefix}.o_proj", spec.hidden_size, width, spec.attention_out_bias)
    if layer.source is not None:
        return BorrowingAttention(
            queries=_queries_alone(take, spec, layer, prefix),
            out=out,
            head_dim=layer.head_dim,
            norm=_head_norm(take, spec, layer, prefix, {"q_norm": spec.heads}) if spec.qk_norm else None,
            rope=rope,
            window=layer.window,
            ring=layer.ring,
            scoring=scoring,
        )
    return SelfAttention(
        qkv=_qkv(take, spec, layer, prefix),
        out=out,
        heads=spec.heads,
        kv_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        norm=_qk_norm(take, spec, layer, prefix),
        rope=rope,
        window=layer.window,
        ring=layer.ring,
        scoring=scoring,
        gated=spec.attention_gate,
        values_are_keys=layer.values_are_keys,
        value_eps=spec.norm.eps if spec.value_norm else None,
    )


def _queries_alone(take: Taker, spec: ModelSpec, layer: LayerSpec, prefix: str) -> Parallel:
    """Some checkpoints have keys and values for layers that borrow them, of no use."""
    for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        if take.has(f"{prefix}.{name}"):
            take.drop(f"{prefix}.{name}")
    rows = spec.heads * layer.head_dim
    return Parallel((take.linear(f"{prefix}.q_proj", rows, spec.hidden_size, spec.qkv_bias),))


def _qkv(take: Taker, spec: ModelSpec, layer: LayerSpec, prefix: str) -> Parallel:
    hidden, q, kv = spec.hidden_size, spec.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    if take.has(f"{prefix}.qkv_proj.weight"):
        return Parallel((take.linear(f"{prefix}.qkv_proj", q + 2 * kv, hidden, spec.qkv_bias),))
    sizes = {"q_proj": q, "k_proj": kv} | ({} if layer.values_are_keys else {"v_proj": kv})
    if spec.attention_gate:
        own = take.has(f"{prefix}.gate_proj.weight")
        sizes |= {"gate_proj": q} if own else {"q_proj": 2 * q}
    parts = [take.linear(f"{prefix}.{name}", rows, hidden, spec.qkv_bias) for name, rows in sizes.items()]
    if spec.attention_gate and len(parts) == 3:
        # A head's query is stored before its gate, and all gates are wanted at the end.
        rows = mx.arange(2 * q).reshape(spec.heads, 2, -1)
        parts = [
            parts[0].with_rows(rows[:, 0].flatten()),
            *parts[1:],
            parts[0].with_rows(rows[:, 1].flatten()),
        ]
    return take.evaluated(fuse(parts))


def _qk_norm(take: Taker, spec: ModelSpec, layer: LayerSpec, prefix: str) -> HeadNorm | AllHeadsNorm | None:
    if spec.qk_norm is None:
        return None
    if spec.qk_norm == "all_heads":
        norm, dim = spec.qk_norm_spec or spec.norm, layer.head_dim
        return AllHeadsNorm(
            take.norm(f"{prefix}.q_norm", norm, spec.heads * dim),
            take.norm(f"{prefix}.k_norm", norm, layer.kv_heads * dim),
            spec.heads,
        )
    return _head_norm(take, spec, layer, prefix, {"q_norm": spec.heads, "k_norm": layer.kv_heads})


def _head_norm(
    take: Taker, spec: ModelSpec, layer: LayerSpec, prefix: str, places: Mapping[str, int]
) -> HeadNorm:
    """Of the heads at these ``places``, so many each."""
    norm, dim = spec.qk_norm_spec or spec.norm, layer.head_dim
    parts = [
        mx.broadcast_to(_head_weight(take, f"{prefix}.{name}", spec, norm, heads, dim), (heads, dim))
        for name, heads in places.items()
    ]
    return take.evaluated(HeadNorm(norm, mx.concatenate(parts)))


def _head_weight(take: Taker, stem: str, spec: ModelSpec, norm: NormSpec, heads: int, dim: int) -> mx.array:
    """One weight for all heads, or one for each: as a matrix or as so many vectors."""
    if take.has(f"{stem}.norms.0.weight"):
        return mx.stack([take.vector(f"{stem}.norms.{head}.weight", dim) for head in range(heads)])
    shape = (dim,) if spec.qk_norm == "head" else (heads, dim)
    return take.norm(stem, norm, *shape).weight


def _latent_attention(
    take: Taker, spec: ModelSpec, latent: LatentSpec, prefix: str, rope: Rope
) -> LatentAttention:
    hidden, heads = spec.hidden_size, spec.heads
    key_up, value_up = _expansions(take, latent, heads, prefix)
    return LatentAttention(
        spec=latent,
        queries=_queries(take, spec, latent, prefix),
        down=take.linear(
            f"{prefix}.kv_a_proj_with_mqa", latent.rank + latent.rope_dim, hidden, spec.qkv_bias
        ),
        down_norm=take.norm(f"{prefix}.kv_a_layernorm", NormSpec(latent.eps), latent.rank),
        key_up=key_up,
        value_up=value_up,
        out=take.linear(f"{prefix}.o_proj", hidden, heads * latent.value_dim, spec.attention_out_bias),
        heads=heads,
        rope=rope,
        scoring=Scoring(spec.attention_scale),
    )


def _queries(take: Taker, spec: ModelSpec, latent: LatentSpec, prefix: str) -> Queries:
    rows = spec.heads * (latent.plain_dim + latent.rope_dim)
    rank = latent.query_rank
    if rank is None:
        return Queries(None, None, take.linear(f"{prefix}.q_proj", rows, spec.hidden_size))
    return Queries(
        take.linear(f"{prefix}.q_a_proj", rank, spec.hidden_size, spec.qkv_bias),
        take.norm(f"{prefix}.q_a_layernorm", NormSpec(latent.eps), rank),
        take.linear(f"{prefix}.q_b_proj", rows, rank),
    )


def _expansions(take: Taker, latent: LatentSpec, heads: int, prefix: str) -> tuple[mx.array, mx.array]:
    """The key and the value part of the expansion, stored apart or as one matrix."""
    plain, value, rank = latent.plain_dim, latent.value_dim, latent.rank
    if take.has(f"{prefix}.embed_q.weight"):
        return (
            take.vector(f"{prefix}.embed_q.weight", heads, rank, plain),
            take.vector(f"{prefix}.unembed_out.weight", heads, value, rank),
        )
    both = take.vector(f"{prefix}.kv_b_proj.weight", heads * (plain + value), rank)
    key_up, value_up = mx.split(both.reshape(heads, plain + value, rank), [plain], axis=1)
    parts = mx.contiguous(key_up.swapaxes(-1, -2)), mx.contiguous(value_up)
    take.evaluate(parts)
    return parts
