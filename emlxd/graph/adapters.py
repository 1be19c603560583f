"""The adapters of a model: which of its projections they change, and what each slot has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx

from emlxd.errors import ModelFormatError
from emlxd.graph.adapter_files import AdapterFile, first_few, read_adapter
from emlxd.graph.delta import Chosen, Delta, LowRank, stack_deltas
from emlxd.graph.families import family_of
from emlxd.graph.names import COMMON, Names, stored_stems
from emlxd.graph.spec import ModelSpec
from emlxd.graph.weights import Weight


class Adapters:
    """Hands out what adapters add to each projection, and knows in the end what nobody asked for."""

    def __init__(self, files: Sequence[AdapterFile], names: Names, dtype: mx.Dtype) -> None:
        self.chosen = Chosen()
        self._files = files
        self._names = names
        self._dtype = dtype
        self._left = [set(file.modules) for file in files]

    def delta(self, stem: str, weight: Weight) -> Delta | None:
        """For the projection ``stem`` with a ``weight`` [out, in]. Raises ModelFormatError."""
        parts = [self._part(number, stem, weight.shape) for number in range(len(self._files))]
        return stack_deltas(parts, self._dtype, self.chosen, weight)

    def expert_delta(self, stems: Sequence[str], stem: str, shape: tuple[int, int]) -> Delta | None:
        """For one projection of all experts, which an adapter has as ``stem``, or as ``stems`` of each."""
        parts = [self._expert_part(number, stems, stem, shape) for number in range(len(self._files))]
        return stack_deltas(parts, self._dtype, self.chosen)

    def _expert_part(
        self, number: int, stems: Sequence[str], stem: str, shape: tuple[int, int]
    ) -> LowRank | None:
        whole = self._part(number, stem, (len(stems), *shape))
        if whole is not None:
            return whole
        parts = [self._part(number, one, shape) for one in stems]
        if any(part and part.magnitude is not None for part in parts):
            raise ModelFormatError(
                f"{self._files[number].path}: has magnitudes (DoRA) for experts, expected none"
            )
        each = stack_deltas(parts, self._dtype, self.chosen)
        return LowRank(each.a, each.b) if each else None

    def _part(self, number: int, stem: str, shape: tuple[int, ...]) -> LowRank | None:
        file, left = self._files[number], self._left[number]
        name = next((name for name in stored_stems(stem, self._names) if name in left), None)
        if name is None:
            return None
        left.discard(name)
        part = file.modules[name]
        found = (*part.a.shape[:-2], part.b.shape[-2], part.a.shape[-1])
        if found != shape:
            stored, expected = (" x ".join(map(str, one)) for one in (found, shape))
            raise ModelFormatError(
                f"{file.path}: '{name}' is for a weight of {stored}, but the model's is {expected}"
            )
        return part

    def finish(self) -> None:
        """Raises ModelFormatError for modules that the model does not have or that cannot be adapted."""
        for file, left in zip(self._files, self._left, strict=True):
            if left:
                raise ModelFormatError(
                    f"{file.path}: adapts {first_few(left)}, "
                    "expected projections of the attention and of the feed-forward layers that the model has"
                )


def open_adapters(
    paths: Sequence[Path], spec: ModelSpec, config: Mapping[str, object], dtype: mx.Dtype
) -> Adapters | None:
    """The adapters in ``paths`` for the model with ``config``; None without any. Raises ModelFormatError."""
    if not paths:
        return None
    files = [read_adapter(path, len(spec.layers)) for path in paths]
    return Adapters(files, {**COMMON, **family_of(config, str(paths[0])).names}, dtype)


class SlotAdapters:
    """The adapter of each slot's sequence, 0 for none."""

    def __init__(self, slots: int) -> None:
        self._of = [0] * slots
        self._arrays: dict[int, mx.array] = {}

    def set(self, slot: int, adapter: int) -> None:
        if self._of[slot] != adapter:
            self._of[slot] = adapter
            self._arrays.clear()

    def move(self, source: int, target: int) -> None:
        self.set(target, self._of[source])
        self.set(source, 0)

    def rows(self, count: int) -> mx.array | None:
        """int32 [count] for the first slots; None where none of them has one."""
        if not any(self._of[:count]):
            return None
        if count not in self._arrays:
            self._arrays[count] = mx.array(self._of[:count], dtype=mx.int32)
        return self._arrays[count]
