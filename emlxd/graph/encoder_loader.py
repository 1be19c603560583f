"""From a checkpoint to an ``Encoder``: takes every tensor, checks its shape, fuses."""

from __future__ import annotations

from contextlib import AbstractContextManager

from emlxd.graph.activations import Activation
from emlxd.graph.checkpoint import Checkpoint
from emlxd.graph.device import Device
from emlxd.graph.encoder import DistanceBias, Encoder, EncoderAttention, EncoderEmbeddings, EncoderLayer
from emlxd.graph.encoder_spec import EncoderSpec
from emlxd.graph.layers import Embedding, Linear, Mlp, Norm, Parallel, fuse
from emlxd.graph.rope import Rope
from emlxd.graph.spec import RopeSpec
from emlxd.graph.taker import Taker


def load_encoder(
    take: Taker,
    spec: EncoderSpec,
    device: Device,
    base: str,
    *,
    max_context: int,
    compile: bool,
    turn: AbstractContextManager[None],
) -> Encoder:
    """Loads all but the head, in ``turn`` with others; the names of its tensors begin with ``base``."""
    activation = device.activation(spec.activation, take.dtype, gated=spec.gated, compile=compile)
    ropes: dict[RopeSpec, Rope] = {}
    layers = []
    for index, layer in enumerate(spec.layers):
        with turn:
            if layer.rope and layer.rope not in ropes:
                ropes[layer.rope] = device.rope(layer.rope, max_context, take.dtype)
            rope = ropes[layer.rope] if layer.rope else None
            layers.append(_layer(take, spec, base, index, rope, activation))
    final, distances = spec.names.final_norm, f"{base}{spec.names.distances}.weight"
    with turn:
        return Encoder(
            spec=spec,
            embeddings=_embeddings(take, spec, base),
            layers=tuple(layers),
            norm=take.norm(base + final, spec.norm, spec.hidden_size) if final else None,
            distances=DistanceBias(take.vector(distances, 32, spec.heads)) if spec.distances else None,
            attention_kind=device.attention(take.dtype, compile=compile),
        )


def base_of(checkpoint: Checkpoint, spec: EncoderSpec) -> str:
    """What the names of this checkpoint's tensors begin with."""
    found = [base for base in spec.names.base if checkpoint.has(f"{base}{spec.names.tokens}.weight")]
    return found[0] if found else spec.names.base[0]


def _embeddings(take: Taker, spec: EncoderSpec, base: str) -> EncoderEmbeddings:
    names, hidden = spec.names, spec.hidden_size

    def table(name: str, rows: int) -> Embedding:
        return Embedding(take.matrix(base + name, rows, hidden), take.dtype)

    return EncoderEmbeddings(
        tokens=table(names.tokens, spec.vocab_size),
        positions=take.vector(f"{base}{names.positions}.weight", spec.positions, hidden)
        if spec.positions
        else None,
        types=take.vector(f"{base}{names.types}.weight", spec.token_types, hidden)
        if spec.token_types
        else None,
        norm=take.norm(base + names.embedding_norm, spec.norm, hidden),
        first_position=spec.first_position,
    )


def _layer(
    take: Taker, spec: EncoderSpec, base: str, index: int, rope: Rope | None, activation: Activation
) -> EncoderLayer:
    names, hidden, layer = spec.names, spec.hidden_size, spec.layers[index]
    prefix = base + names.layer.format(index)

    def linear(name: str, rows: int, columns: int, bias: bool) -> Linear:
        return take.linear(prefix + name, rows, columns, bias)

    def fused(parts: tuple[str, ...], rows: int, bias: bool) -> Parallel:
        each = rows // len(parts)
        return take.evaluated(fuse([linear(name, each, hidden, bias) for name in parts]))

    def norm(name: str) -> Norm:
        return take.norm(prefix + name, spec.norm, hidden)

    width = spec.intermediate_size
    return EncoderLayer(
        attention=EncoderAttention(
            qkv=fused(names.qkv, 3 * hidden, spec.qkv_bias),
            out=linear(names.out, hidden, hidden, spec.out_bias),
            heads=spec.heads,
            rope=rope,
            window=layer.window,
        ),
        attention_norm=norm(names.attention_norm) if layer.attention_norm else None,
        mlp=Mlp(
            gate_up=fused(names.up, width * (2 if spec.gated else 1), spec.mlp_bias),
            down=linear(names.down, hidden, width, spec.mlp_bias),
            activation=activation,
            gated=spec.gated,
        ),
        mlp_norm=norm(names.mlp_norm),
        pre_norm=spec.pre_norm,
    )
