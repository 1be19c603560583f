"""Which decoders the fused step computes: those whose layers are all of the common kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from emlxd.graph.cuda.shape import CHUNK, UNIT
from emlxd.graph.layers import HeadNorm, Linear, Mlp, Norm, Parallel
from emlxd.graph.rope import FusedRope
from emlxd.graph.self_attention import SelfAttention
from emlxd.graph.spec import ModelSpec
from emlxd.graph.transformer import Layer, Transformer

_HEAD_DIMS: Final = (64, 128)
_MOST_SHARED: Final = 8  # query heads to a key head
_GROUPS: Final = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Block:
    """The parts of one layer that the kernel reads."""

    attention_norm: Norm
    qkv: Linear
    qk_norm: HeadNorm | None
    magnitude: float
    turns: mx.array | None
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear

    def matrices(self) -> tuple[Linear, ...]:
        return self.qkv, self.out, self.gate_up, self.down


def may_take(spec: ModelSpec) -> bool:
    """Whether the kernel computes decoders of this kind, if their weights are in a format that it reads."""
    share, rest = divmod(spec.heads, spec.kv_heads)
    sizes = (spec.hidden_size, spec.intermediate_size, spec.heads * spec.head_dim)
    return (
        spec.head_dim in _HEAD_DIMS
        and rest == 0
        and share <= _MOST_SHARED
        and not any(size % CHUNK for size in sizes)
        and spec.vocab_size % UNIT == 0
        and spec.norm.kind == "rms"
        and not spec.norm.bias
        and spec.activation == "silu"
        and spec.gated
        and not (spec.parallel or spec.mlp_bias or spec.sinks or spec.latent)
        and not (spec.value_norm or spec.layer_scale or spec.layer_inputs)
        and not spec.attention_soft_cap
        and spec.position_scale is None
        and (spec.qk_norm_spec or spec.norm).kind == "rms"
        and not any(layer.window or layer.experts or layer.recurrent for layer in spec.layers)
    )


def blocks_of(model: Transformer) -> list[Block] | None:
    """The layers of ``model``, or None if one of them, or the whole, is of another kind."""
    if model.dtype != mx.bfloat16 or not may_take(model.spec):
        return None
    blocks = [_block(layer) for layer in model.layers]
    found = [block for block in blocks if block is not None]
    return found if len(found) == len(blocks) and _uniform(found, model.head) else None


def _block(layer: Layer) -> Block | None:
    mixer, mlp, attention_norm, mlp_norm = layer.mixer, layer.feed_forward, layer.attention_in, layer.mlp_in
    if not (isinstance(mixer, SelfAttention) and isinstance(mlp, Mlp)):
        return None
    if attention_norm is None or mlp_norm is None or layer.attention_out or layer.mlp_out:
        return None
    if mixer.gated:
        return None
    norm, rope = mixer.norm, mixer.rope
    if not (norm is None or isinstance(norm, HeadNorm)) or not (rope is None or isinstance(rope, FusedRope)):
        return None
    if rope is not None and not rope.turns_halves(mixer.head_dim):
        return None
    qkv, gate_up = _single(mixer.qkv), _single(mlp.gate_up)
    if qkv is None or gate_up is None:
        return None
    return Block(
        attention_norm=attention_norm,
        qkv=qkv,
        qk_norm=norm,
        magnitude=rope.magnitude if rope else 1.0,
        turns=rope.turns if rope else None,
        out=mixer.out,
        mlp_norm=mlp_norm,
        gate_up=gate_up,
        down=mlp.down,
    )


def _single(parallel: Parallel) -> Linear | None:
    return parallel.parts[0] if len(parallel.parts) == 1 else None


def _uniform(blocks: list[Block], head: Linear) -> bool:
    """Whether one kernel does for all matrices: one format, one magnitude of rotation."""
    matrices = [head, *(linear for block in blocks for linear in block.matrices())]
    formats = {linear.weight.quantization for linear in matrices}
    magnitudes = {block.magnitude for block in blocks}
    adapted = any(linear.delta for linear in matrices)
    one_kind = len(formats) == 1 and len(magnitudes) == 1 and not adapted
    return one_kind and _readable(head) and head.bias is None


def _readable(linear: Linear) -> bool:
    q = linear.weight.quantization
    return q is None or (q.bits == 4 and q.mode == "affine" and q.group_size in _GROUPS)
