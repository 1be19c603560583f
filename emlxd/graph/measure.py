"""What a model's files say of its size, read from their headers alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from emlxd.graph.checkpoint import open_checkpoint
from emlxd.graph.cuda.support import may_take
from emlxd.graph.families import spec_of
from emlxd.graph.gguf import GgufFile, TensorInfo
from emlxd.graph.gguf_blocks import KEPT_BITS
from emlxd.graph.measure_adapters import adapter_values
from emlxd.graph.safetensors import open_safetensors
from emlxd.graph.spec import LayerSpec, ModelSpec, ring_size
from emlxd.graph.weights import Quantization

_FORMS: Final = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint8: "FP8"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of ``values`` numbers.

    A quantised one takes ``packed`` bytes if it stays so, and ``scales`` numbers of the compute type.
    ``form`` is what people call the type that it is stored in, such as Q4_K, 4-bit or BF16.
    """

    values: int
    packed: int = 0
    scales: int = 0
    form: str = ""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What ``emlxd.memory`` computes with.

    ``cached_values`` are what a token leaves in the K/V cache, all layers without a window together, and
    ``windows`` pairs windows with what it leaves in all layers that have this one; ``state_values`` and
    ``exact_values`` what a slot's states take whatever its length, the latter in float32. ``widest_row`` is
    what the widest layer computes for a token, ``packed_values`` what a layer has in quantised matrices.
    ``usual_context`` is what it reads unless told to read more, None for all. ``decodes_fused``: of a kind
    that the decode kernel takes.
    """

    tensors: tuple[StoredTensor, ...]
    cached_values: int
    widest_row: int
    heads: int
    vocab_size: int
    max_position: int
    usual_context: int | None = None
    state_values: int = 0
    exact_values: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    decodes_fused: bool = False
    packed_values: int = 0

    def kept_values(self, max_context: int, step_tokens: int) -> int:
        """What a slot keeps of its tokens, if a step computes up to ``step_tokens`` of them."""
        kept = self.cached_values * max_context
        for window, values in self.windows:
            ring = ring_size(window, max_context, step_tokens)
            kept += values * (ring + 1 if ring else max_context)
        return kept


def measure(path: Path, quantize: Quantization | None = None, adapters: Sequence[Path] = ()) -> ModelFacts:
    """Reads the headers of a GGUF file or a model folder. Raises ModelFormatError.

    ``quantize`` is what dense weights will become; ``adapters`` are folders.
    """
    config = open_checkpoint(path).config
    spec = spec_of(config, str(path))
    if path.is_dir():
        tensors = tuple(tensors_of_folder(path, config, quantize))
    else:
        tensors = tuple(_of_gguf(info, quantize) for info in GgufFile(path).tensors.values())
    mixer = max(_mixer_row(spec, layer) for layer in spec.layers)
    kept = [(math.prod(one.shape), one, layer) for layer in spec.layers for one in spec.kept(layer, 1)]
    by_window: Counter[int | None] = Counter()
    for values, one, layer in kept:
        by_window[layer.window] += values * one.by_token
    return ModelFacts(
        tensors=(*tensors, StoredTensor(adapter_values(adapters, spec))),
        cached_values=by_window.pop(None, 0),
        windows=tuple((window, values) for window, values in by_window.items() if window),
        state_values=sum(values for values, one, _ in kept if not one.by_token and not one.exact),
        exact_values=sum(values for values, one, _ in kept if not one.by_token and one.exact),
        widest_row=mixer + 2 * max(layer.width for layer in spec.layers) + 2 * spec.hidden_size,
        heads=spec.heads,
        vocab_size=spec.vocab_size,
        max_position=spec.max_position,
        decodes_fused=may_take(spec) and not adapters,
        packed_values=_packed_values(tensors, spec),
    )


def _packed_values(tensors: Sequence[StoredTensor], spec: ModelSpec) -> int:
    """Of a layer, on average; neither the embedding nor the head is in one."""
    ends = spec.vocab_size * spec.hidden_size
    return sum(one.values for one in tensors if one.packed and one.values != ends) // len(spec.layers)


def _mixer_row(spec: ModelSpec, layer: LayerSpec) -> int:
    if layer.recurrent:
        return layer.recurrent.widest_row
    return (spec.heads + 2 * layer.kv_heads) * layer.head_dim


def _of_gguf(info: TensorInfo, quantize: Quantization | None) -> StoredTensor:
    if info.block.name in KEPT_BITS:
        quantize = Quantization(32, KEPT_BITS[info.block.name])
    return _dense(info.shape, info.block.name, quantize)


def _dense(shape: Sequence[int], form: str, quantize: Quantization | None) -> StoredTensor:
    """A tensor that ``quantize`` changes, if it is a matrix that divides into groups."""
    values = math.prod(shape)
    if quantize is None or len(shape) < 2 or shape[-1] % quantize.group_size:
        return StoredTensor(values, form=form)
    packed, scales = values * quantize.bits // 8, 2 * values // quantize.group_size
    return StoredTensor(values, packed, scales, form)


def tensors_of_folder(
    path: Path, config: Mapping[str, Any], quantize: Quantization | None
) -> Iterator[StoredTensor]:
    """Those of all its safetensors files."""
    quantization = config.get("quantization") or {}
    for file in path.glob("*.safetensors"):
        tensors = open_safetensors(file)
        for name, tensor in tensors.items():
            stem, _, kind = name.rpartition(".")
            scales = tensors.get(f"{stem}.scales")
            if scales is None:
                yield _dense(tensor.shape, _FORMS.get(tensor.dtype, str(tensor.dtype)), quantize)
            elif kind == "weight":
                yield _quantized(
                    tensor, scales, tensors.get(f"{stem}.biases"), _group_size(quantization, stem)
                )


def _quantized(data: mx.array, scales: mx.array, biases: mx.array | None, group_size: int) -> StoredTensor:
    values = scales.size * group_size
    form = f"{8 * data.nbytes // values}-bit"
    if not mx.issubdtype(scales.dtype, mx.floating):  # of the mx formats, which have no biases
        return StoredTensor(values, data.nbytes + scales.nbytes, form=form)
    return StoredTensor(values, data.nbytes, scales.size + (0 if biases is None else biases.size), form)


def _group_size(quantization: Mapping[str, Any], stem: str) -> int:
    own = quantization.get(stem)
    return int((own if isinstance(own, dict) else quantization).get("group_size", 64))
