"""Takes tensors out of a checkpoint in the form that the model computes with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import mlx.core as mx

from emlxd.errors import ModelFormatError
from emlxd.graph.adapter_files import first_few
from emlxd.graph.adapters import Adapters
from emlxd.graph.checkpoint import Checkpoint
from emlxd.graph.delta import Delta
from emlxd.graph.layers import Linear, Norm, arrays_in
from emlxd.graph.spec import NormSpec
from emlxd.graph.weights import ExpandFrom, Quantization, Weight, quantize

T = TypeVar("T")


class Taker:
    """Every tensor is checked for its shape, and missing ones are noted, so that all can be named at once.

    After the first missing one nothing is evaluated any more: loading goes on only to find the others.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: mx.Dtype,
        *,
        keep_quantized: bool,
        requantize: Quantization | None,
        adapters: Adapters | None = None,
        expand_from: ExpandFrom | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._adapters = adapters
        self.dtype = dtype
        self._keep_quantized = keep_quantized
        self._requantize = requantize
        self._expand_from = expand_from
        self._missing: list[str] = []

    def has(self, name: str) -> bool:
        return self._checkpoint.has(name)

    def vector(self, name: str, *shape: int, dtype: mx.Dtype | None = None, row: bool = False) -> mx.array:
        """A small dense tensor; as a ``row`` it may also be stored as [1, ...]."""
        found = self._take(name, shape, dtype or self.dtype, *([(1, *shape)] if row else []))
        data = found.data.reshape(shape)
        self.evaluate([data])
        return data

    def matrix(self, stem: str, *shape: int, quantize_dense: bool = True) -> Weight:
        """The weight [..., rows, columns] of a projection or a table."""
        weight = self._take(f"{stem}.weight", shape, None if self._keep_quantized else self.dtype)
        weight = weight.astype(self.dtype)
        wanted = self._requantize if quantize_dense and not weight.quantization else None
        if wanted and weight.shape[-1] % wanted.group_size == 0:
            weight = quantize(weight, wanted)
        self.evaluate(weight.arrays())
        return weight

    def kernel(self, stem: str, channels: int, width: int) -> mx.array:
        """The weight [channels, width] of a convolution of each channel for itself, in either layout."""
        name = f"{stem}.weight"
        found = self._take(name, (channels, width, 1), self.dtype, (channels, 1, width))
        return found.data.reshape(channels, width)

    def linear(
        self, stem: str, rows: int, columns: int, bias: bool = False, *, quantize_dense: bool = True
    ) -> Linear:
        """A projection, with what adapters make of it."""
        weight = self.matrix(stem, rows, columns, quantize_dense=quantize_dense)
        vector = self.vector(f"{stem}.bias", rows) if bias else None
        delta = self._adapters.delta(stem, weight) if self._adapters else None
        self.evaluate(arrays_in(delta))
        return Linear(self.for_products(weight), vector, delta)

    def for_products(self, weight: Weight) -> Weight:
        """Told when to expand: a matrix, or a stack of them [experts, rows, columns]."""
        if self._expand_from is None or weight.quantization is None:
            return weight
        limits, (*stack, _, _) = self._expand_from, weight.shape
        return replace(weight, expand_from=limits.expert * stack[0] if stack else limits.matrix)

    def expert_delta(self, stems: Sequence[str], stem: str, rows: int, columns: int) -> Delta | None:
        """What adapters add to one projection of all experts: ``stem``, or each of ``stems``."""
        delta = self._adapters.expert_delta(stems, stem, (rows, columns)) if self._adapters else None
        self.evaluate(arrays_in(delta))
        return delta

    def norm(self, stem: str, spec: NormSpec, *shape: int, dtype: mx.Dtype | None = None) -> Norm:
        weight = self.vector(f"{stem}.weight", *shape, dtype=dtype)
        if spec.plus_one is True or (spec.plus_one == "published" and not self._checkpoint.converted):
            weight = weight + 1
            self.evaluate([weight])
        return Norm(spec, weight, self.vector(f"{stem}.bias", *shape) if spec.bias else None)

    def drop(self, name: str) -> None:
        """The model does without a tensor that is there."""
        self._checkpoint.take(name)

    def evaluate(self, arrays: Iterable[mx.array]) -> None:
        if not self._missing:
            mx.eval(list(arrays))

    def evaluated(self, part: T) -> T:
        """Evaluated at once: what it was made of must not outlive it."""
        self.evaluate(arrays_in(part))
        return part

    def finish(self) -> None:
        """Raises ModelFormatError naming what is missing or what nobody took, of adapters too."""
        path = self._checkpoint.path
        if self._missing:
            raise ModelFormatError(f"{path}: lacks tensors of its architecture: {first_few(self._missing)}")
        if names := self._checkpoint.leftovers():
            raise ModelFormatError(
                f"{path}: has tensors that the architecture does not use: {first_few(names)}"
            )
        if self._adapters:
            self._adapters.finish()

    def _take(
        self, name: str, shape: tuple[int, ...], dense: mx.Dtype | None, *others: tuple[int, ...]
    ) -> Weight:
        """``others`` are shapes that it may have as well."""
        found = self._checkpoint.take(name, dense)
        if found is None:
            self._missing.append(self._checkpoint.stored_name(name))
            return Weight(mx.zeros(shape, self.dtype))
        if found.shape not in (shape, *others):
            raise ModelFormatError(
                f"{self._checkpoint.path}: the tensor '{self._checkpoint.stored_name(name)}' has the shape "
                f"{found.shape}, expected {shape}"
            )
        return found
