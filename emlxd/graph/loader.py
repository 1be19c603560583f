"""From a checkpoint to a ``Transformer``: takes every tensor, checks its shape, fuses, frees as it goes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from emlxd.graph.adapters import open_adapters
from emlxd.graph.build import build_layer, build_layer_inputs
from emlxd.graph.checkpoint import Checkpoint
from emlxd.graph.delta import Chosen
from emlxd.graph.device import Device
from emlxd.graph.families import spec_of
from emlxd.graph.layers import Embedding, Linear
from emlxd.graph.rope import Rope
from emlxd.graph.spec import ModelSpec
from emlxd.graph.taker import Taker
from emlxd.graph.transformer import Layer, Transformer
from emlxd.graph.weights import Quantization


def load_transformer(
    checkpoint: Checkpoint,
    device: Device,
    *,
    max_context: int,
    dtype: str = "auto",
    weights: str = "auto",
    quantize: Quantization | None = None,
    compile: bool = True,
    adapters: Sequence[Path] = (),
    step_tokens: int | None = None,
    turn: AbstractContextManager[None] | None = None,
) -> Transformer:
    """Loads a model onto the device, in this thread: each layer within a ``turn``, so that others get theirs.

    ``quantize`` is for the matrices that are stored dense; ``adapters`` are folders. With ``step_tokens``,
    the most that one step will compute for a row, layers with a window keep rings.

    Raises ModelFormatError for missing, misshapen and leftover tensors.
    """
    turn = turn or nullcontext()
    spec = spec_of(checkpoint.config, str(checkpoint.path))
    if step_tokens:
        spec = spec.with_rings(max_context, step_tokens)
    compute = device.dtype(dtype)
    keep = device.keeps_quantized("keep" if quantize else weights)
    adapted = open_adapters(adapters, spec, checkpoint.config, compute)
    take = Taker(
        checkpoint,
        compute,
        keep_quantized=keep,
        requantize=quantize,
        adapters=adapted,
        expand_from=device.expand_from,
    )
    with turn:
        embedding = Embedding(take.matrix("model.embed_tokens", spec.vocab_size, spec.hidden_size), compute)
        norm = take.norm("model.norm", spec.norm, spec.hidden_size)
        head = _head(take, spec, embedding)
        layer_inputs = build_layer_inputs(take, spec)
    layers = _layers(take, spec, device, max_context, compile, turn)
    take.finish()
    return Transformer(
        spec=spec,
        dtype=compute,
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=head,
        attention=device.attention(compute, compile=compile),
        adapters=adapted.chosen if adapted else Chosen(),
        by_layers=device.prefills_by_layers,
        layer_inputs=layer_inputs,
    )


def _layers(
    take: Taker,
    spec: ModelSpec,
    device: Device,
    max_context: int,
    compile: bool,
    turn: AbstractContextManager[None],
) -> tuple[Layer, ...]:
    functions = device.functions(spec.activation, take.dtype, gated=spec.gated, compile=compile)
    ropes: dict[int, Rope] = {}
    layers = []
    for index, layer in enumerate(spec.layers):
        if layer.rope and id(layer.rope) not in ropes:
            ropes[id(layer.rope)] = device.rope(layer.rope, max_context, take.dtype)
        with turn:
            layers.append(build_layer(take, spec, layer, index, ropes.get(id(layer.rope)), functions))
    return tuple(layers)


def _head(take: Taker, spec: ModelSpec, embedding: Embedding) -> Linear:
    own = take.has("lm_head.weight")
    if spec.tied_head or (spec.tied_head is None and not own):
        if own:
            take.drop("lm_head.weight")
        return Linear(embedding.weight)
    # Not take.linear: the head sees single tokens, not the rows that adapters are chosen for.
    weight = take.matrix("lm_head", spec.vocab_size, spec.hidden_size)
    return Linear(weight, take.vector("lm_head.bias", spec.vocab_size) if spec.head_bias else None)
