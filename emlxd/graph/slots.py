"""What each slot brings to sampling: its parameters and, where it asks for them, biases and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final

import mlx.core as mx

from emlxd.core import SamplingParams
from emlxd.graph.batch import Begin
from emlxd.graph.sampling import SamplingMode, fold_seed, param_row

IDLE: Final = SamplingParams(temperature=0.0)
FOREVER: Final = 2**31 - 1  # a position that no sequence has


class SlotSampling:
    """Arrays of ``slots`` rows; the large ones, [slots, vocab], exist once a request has needed them."""

    def __init__(self, slots: int, vocab_size: int, end_tokens: Collection[int]) -> None:
        self._shape = (slots, vocab_size)
        self._params = [IDLE] * slots
        self._until = [0] * slots
        self._end_tokens = [token for token in end_tokens if token < vocab_size]
        self._large: dict[str, mx.array] = {}
        self._small: dict[str, mx.array] = {}

    def params(self, slot: int) -> SamplingParams:
        return self._params[slot]

    def begin(self, slot: int, begin: Begin) -> None:
        """A sequence starts to sample in ``slot``."""
        params = self._params[slot] = begin.sampling
        self._until[slot] = min(len(begin.prompt) - 1 + params.min_tokens, FOREVER)
        self._small.clear()
        if params.penalized:
            self._row("seen", mx.bool_)[slot] = False
            self._row("seen", mx.bool_)[slot, mx.array(list(begin.prompt))] = True
            self._row("counts", mx.int32)[slot] = 0
            for token, count in Counter(begin.answer).items():
                self._row("counts", mx.int32)[slot, token] = count
        if params.logit_bias or "bias" in self._large:
            self._row("bias", mx.float32)[slot] = 0.0
        for token, bias in params.logit_bias:
            self._row("bias", mx.float32)[slot, token] = bias

    def move(self, source: int, target: int) -> None:
        self._params[target], self._params[source] = self._params[source], IDLE
        self._until[target] = self._until[source]
        self._small.clear()
        for array in self._large.values():
            array[target] = array[source]

    def release(self, slot: int) -> None:
        """The slot's sequence has ended: it no longer asks for a stage."""
        self._params[slot] = IDLE
        self._small.clear()

    def mode(self, slots: slice | Sequence[int]) -> SamplingMode:
        chosen = self._params[slots] if isinstance(slots, slice) else [self._params[slot] for slot in slots]
        return SamplingMode.of(chosen)

    def arrays(self, mode: SamplingMode) -> dict[str, mx.array]:
        """What ``sampling.Rows`` needs in this mode, for all slots; ``ends`` has no rows."""
        names = [name for name, needed in self._needs(mode) if needed]
        return {name: self._array(name) for name in names}

    def count(self, slots: Sequence[int], tokens: mx.array) -> None:
        """Counts sampled tokens [len(slots)], where anybody asks for penalties."""
        if "counts" in self._large:
            self._large["counts"] = self._large["counts"].at[mx.array(list(slots)), tokens].add(1)

    def replace_counts(self, counts: mx.array | None) -> None:
        """Takes the counts that a step has updated."""
        if counts is not None:
            self._large["counts"] = counts

    def state(self) -> list[mx.array]:
        """What must be evaluated with every step."""
        return list(self._large.values())

    @staticmethod
    def _needs(mode: SamplingMode) -> list[tuple[str, bool]]:
        return [
            ("params", mode.random or mode.penalties),
            ("seeds", mode.random),
            ("bias", mode.bias),
            ("until", mode.bias),
            ("ends", mode.bias),
            ("counts", mode.penalties),
            ("seen", mode.penalties),
        ]

    def _array(self, name: str) -> mx.array:
        match name:
            case "bias":
                return self._row(name, mx.float32)
            case "counts":
                return self._row(name, mx.int32)
            case "seen":
                return self._row(name, mx.bool_)
        if name not in self._small:
            self._small[name] = self._make(name)
        return self._small[name]

    def _make(self, name: str) -> mx.array:
        match name:
            case "params":
                return mx.array([param_row(params) for params in self._params], dtype=mx.float32)
            case "seeds":
                return mx.array([fold_seed(params.seed or 0) for params in self._params], dtype=mx.uint32)
            case "until":
                return mx.array(self._until, dtype=mx.int32)
        ends = mx.zeros((self._shape[1],), mx.float32)
        if self._end_tokens:
            ends[mx.array(self._end_tokens)] = -mx.inf
        return ends

    def _row(self, name: str, dtype: mx.Dtype) -> mx.array:
        if name not in self._large:
            self._large[name] = mx.zeros(self._shape, dtype)
        return self._large[name]
