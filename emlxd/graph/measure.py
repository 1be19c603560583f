"""What a model's files say of its size, read from their headers alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from emlxd.graph.checkpoint import open_checkpoint
from emlxd.graph.families import spec_of
from emlxd.graph.gguf import GgufFile, TensorInfo
from emlxd.graph.safetensors import open_safetensors


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of ``values`` numbers.

    A quantised one takes ``packed`` bytes if it stays so, and ``scales`` numbers of the compute type.
    """

    values: int
    packed: int = 0
    scales: int = 0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What ``emlxd.memory`` computes with.

    ``cached_values`` are what a token leaves in the K/V cache, all layers together; ``widest_row`` is what
    the widest layer computes for a token.
    """

    tensors: tuple[StoredTensor, ...]
    cached_values: int
    widest_row: int
    heads: int
    vocab_size: int
    max_position: int


def measure(path: Path) -> ModelFacts:
    """Reads the headers of a GGUF file or a model folder. Raises ModelFormatError."""
    config = open_checkpoint(path).config
    spec = spec_of(config, str(path))
    tensors = _of_folder(path, config) if path.is_dir() else map(_of_gguf, GgufFile(path).tensors.values())
    attention = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    return ModelFacts(
        tensors=tuple(tensors),
        cached_values=len(spec.layers) * sum(math.prod(shape) for shape in spec.cache_shape(1, 1)),
        widest_row=attention + 2 * spec.intermediate_size + 2 * spec.hidden_size,
        heads=spec.heads,
        vocab_size=spec.vocab_size,
        max_position=spec.max_position,
    )


def _of_gguf(info: TensorInfo) -> StoredTensor:
    values = math.prod(info.shape)
    quantized = re.match(r"Q(\d)_", info.block.name)
    if quantized is None:
        return StoredTensor(values)
    return StoredTensor(values, values * int(quantized[1]) // 8, 2 * values // info.block.weights)


def _of_folder(path: Path, config: Mapping[str, Any]) -> Iterator[StoredTensor]:
    quantization = config.get("quantization") or {}
    for file in path.glob("*.safetensors"):
        tensors = open_safetensors(file)
        for name, tensor in tensors.items():
            stem, _, kind = name.rpartition(".")
            scales = tensors.get(f"{stem}.scales")
            if scales is None:
                yield StoredTensor(tensor.size)
            elif kind == "weight":
                yield _quantized(
                    tensor, scales, tensors.get(f"{stem}.biases"), _group_size(quantization, stem)
                )


def _quantized(data: mx.array, scales: mx.array, biases: mx.array | None, group_size: int) -> StoredTensor:
    values = scales.size * group_size
    if not mx.issubdtype(scales.dtype, mx.floating):  # of the mx formats, which have no biases
        return StoredTensor(values, data.nbytes + scales.nbytes)
    return StoredTensor(values, data.nbytes, scales.size + (0 if biases is None else biases.size))


def _group_size(quantization: Mapping[str, Any], stem: str) -> int:
    own = quantization.get(stem)
    return int((own if isinstance(own, dict) else quantization).get("group_size", 64))
