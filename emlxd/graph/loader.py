"""From a checkpoint to a ``Transformer``: takes every tensor, checks its shape, fuses, frees as it goes."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from emlxd.errors import ModelFormatError
from emlxd.graph.checkpoint import Checkpoint
from emlxd.graph.device import Device
from emlxd.graph.families import spec_of
from emlxd.graph.layers import Embedding, Linear, Parallel, fuse
from emlxd.graph.spec import ModelSpec
from emlxd.graph.transformer import Layer, Transformer
from emlxd.graph.weights import Weight

Progress = Callable[[int, int], None]


def load_transformer(
    checkpoint: Checkpoint,
    device: Device,
    *,
    max_context: int,
    dtype: str = "auto",
    weights: str = "auto",
    compile: bool = True,
    progress: Progress | None = None,
) -> Transformer:
    """Loads a model onto the device, in this thread. ``progress`` is told of layers done and in all.

    Raises ModelFormatError for a missing, misshapen or leftover tensor.
    """
    spec = spec_of(checkpoint.config, str(checkpoint.path))
    compute = device.dtype(dtype)
    take = _Taker(checkpoint, compute, device.keeps_quantized(weights))
    embedding = Embedding(take.matrix("model.embed_tokens", spec.vocab_size, spec.hidden_size), compute)
    layers = []
    for index in range(spec.layers):
        layers.append(_layer(take, spec, f"model.layers.{index}"))
        if progress:
            progress(index + 1, spec.layers)
    model = Transformer(
        spec=spec,
        dtype=compute,
        embedding=embedding,
        layers=tuple(layers),
        norm=take.vector("model.norm.weight", spec.hidden_size),
        head=_head(take, spec, embedding),
        rope=device.rope(spec.rope, max_context),
        attention=device.attention(compute, compile=compile),
        activation=device.swiglu(compute, compile=compile),
    )
    _refuse_leftovers(checkpoint)
    mx.eval(model.arrays())
    return model


def _layer(take: _Taker, spec: ModelSpec, prefix: str) -> Layer:
    hidden, q, kv = spec.hidden_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    bias = spec.attention_bias
    qkv = [
        take.linear(f"{attention}.{name}", rows, hidden, bias)
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    ]
    gate_up = [
        take.linear(f"{mlp}.{name}", spec.intermediate_size, hidden, spec.mlp_bias)
        for name in ("gate_proj", "up_proj")
    ]
    return Layer(
        attention_norm=take.vector(f"{prefix}.input_layernorm.weight", hidden),
        qkv=_evaluated(fuse(qkv)),
        attention_out=take.linear(f"{attention}.o_proj", hidden, q, bias),
        mlp_norm=take.vector(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=_evaluated(fuse(gate_up)),
        down=take.linear(f"{mlp}.down_proj", hidden, spec.intermediate_size, spec.mlp_bias),
    )


def _head(take: _Taker, spec: ModelSpec, embedding: Embedding) -> Linear:
    if spec.tied_head:
        return Linear(embedding.weight)
    return Linear(take.matrix("lm_head", spec.vocab_size, spec.hidden_size))


def _evaluated(parallel: Parallel) -> Parallel:
    """Evaluated at once: the parts must not outlive their fused copy."""
    for part in parallel.parts:
        mx.eval(part.weight.arrays())
    return parallel


class _Taker:
    """Takes tensors in the form the model computes with."""

    def __init__(self, checkpoint: Checkpoint, dtype: mx.Dtype, keep_quantized: bool) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._keep_quantized = keep_quantized

    def vector(self, name: str, size: int) -> mx.array:
        data = self._checkpoint.take(name).data.astype(self._dtype)
        self._expect(name, data.shape, (size,))
        mx.eval(data)
        return data

    def matrix(self, stem: str, rows: int, columns: int) -> Weight:
        stored = self._checkpoint.take(f"{stem}.weight")
        weight = stored.astype(self._dtype) if self._keep_quantized else stored.dense(self._dtype)
        self._expect(f"{stem}.weight", weight.shape, (rows, columns))
        mx.eval(weight.arrays())
        return weight

    def linear(self, stem: str, rows: int, columns: int, bias: bool) -> Linear:
        weight = self.matrix(stem, rows, columns)
        return Linear(weight, self.vector(f"{stem}.bias", rows) if bias else None)

    def _expect(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            raise ModelFormatError(
                f"{self._checkpoint.path}: the tensor '{name}' has the shape {shape}, expected {expected}"
            )


def _refuse_leftovers(checkpoint: Checkpoint) -> None:
    if names := checkpoint.leftovers():
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise ModelFormatError(f"{checkpoint.path}: has tensors that the architecture does not use: {shown}")
