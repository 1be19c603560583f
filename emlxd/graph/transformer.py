"""The decoder: tokens in, hidden states out, keys and values written into the cache on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from emlxd.graph.attention import Attention, Place, read, write
from emlxd.graph.layers import Activation, Embedding, Linear, Parallel
from emlxd.graph.rope import Rope
from emlxd.graph.spec import ModelSpec

Rotate = Callable[[mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: attention and feed-forward, each normalised before and added to the residual stream."""

    attention_norm: mx.array
    qkv: Parallel
    attention_out: Linear
    mlp_norm: mx.array
    gate_up: Parallel
    down: Linear


@dataclass(frozen=True, slots=True)
class Transformer:
    """A decoder ready to run. Its weights are constants of whatever is compiled around it."""

    spec: ModelSpec
    dtype: mx.Dtype
    embedding: Embedding
    layers: tuple[Layer, ...]
    norm: mx.array
    head: Linear
    rope: Rope
    attention: Attention
    activation: Activation

    def forward(
        self, tokens: mx.array, place: Place, keys: Sequence[mx.array], values: Sequence[mx.array]
    ) -> mx.array:
        """tokens int32 [B, L] -> hidden states [B, L, D]. Writes this step into ``keys`` and ``values``."""
        x = self.embedding(tokens)
        rotate = self.rope.at(place.starts, place.length)
        mask = self.attention.mask(place)
        for layer, k, v in zip(self.layers, keys, values, strict=True):
            h = mx.fast.rms_norm(x, layer.attention_norm, self.spec.norm_eps)
            x = x + self._attend(layer, h, rotate, mask, place, k, v)
            h = mx.fast.rms_norm(x, layer.mlp_norm, self.spec.norm_eps)
            gate, up = mx.split(layer.gate_up(h), 2, axis=-1)
            x = x + layer.down(self.activation(gate, up))
        return x

    def logits(self, hidden: mx.array) -> mx.array:
        """[..., D] -> float32 [..., vocab_size]"""
        return self.head(mx.fast.rms_norm(hidden, self.norm, self.spec.norm_eps)).astype(mx.float32)

    def _attend(
        self,
        layer: Layer,
        x: mx.array,
        rotate: Rotate,
        mask: mx.array,
        place: Place,
        keys: mx.array,
        values: mx.array,
    ) -> mx.array:
        spec, (batch, length, _) = self.spec, x.shape
        qkv = layer.qkv(x).reshape(batch, length, -1, spec.head_dim)
        qk, v = mx.split(qkv, [spec.heads + spec.kv_heads], axis=2)
        q, k = mx.split(rotate(qk), [spec.heads], axis=2)
        write(keys, k.swapaxes(1, 2), place)
        write(values, v.swapaxes(1, 2), place)
        out = self.attention(
            q.swapaxes(1, 2), read(keys, place), read(values, place), spec.head_dim**-0.5, mask
        )
        return layer.attention_out(out.swapaxes(1, 2).reshape(batch, length, -1))

    def arrays(self) -> list[mx.array]:
        """Every weight once, also when the head is the embedding."""
        linears = [self.head]
        for layer in self.layers:
            linears += [*layer.qkv.parts, layer.attention_out, *layer.gate_up.parts, layer.down]
        arrays = [self.norm, *self.embedding.weight.arrays()]
        arrays += [norm for layer in self.layers for norm in (layer.attention_norm, layer.mlp_norm)]
        for linear in linears:
            arrays += linear.weight.arrays()
            arrays += [] if linear.bias is None else [linear.bias]
        return list({id(array): array for array in arrays}.values())

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())
