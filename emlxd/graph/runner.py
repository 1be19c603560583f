"""Runs a model's steps on the device: the one object of ``graph`` that a worker talks to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import mlx.core as mx

from emlxd.core import SamplingParams
from emlxd.graph.attention import Place
from emlxd.graph.batch import PrefillRow
from emlxd.graph.kv_cache import KVCache
from emlxd.graph.sampling import SamplingArrays, SamplingMode, sample
from emlxd.graph.step import DecodeSteps, StepShape
from emlxd.graph.transformer import Transformer

_IDLE: Final = SamplingParams(temperature=0.0)


class Pending:
    """A dispatched step, still running on the device."""

    def __init__(self, tokens: mx.array, rows: int, barrier: mx.array | None = None) -> None:
        self._tokens = tokens
        self._rows = rows
        self._barrier = barrier

    def read(self) -> list[int]:
        """Waits for the step; one token for each row that samples, in the order of the rows."""
        if self._barrier is not None:
            mx.eval(self._barrier)
        return cast("list[int]", self._tokens.tolist())[: self._rows]


class MlxRunner:
    """A model, its cache and its compiled steps. Use it only on the thread that made it."""

    def __init__(self, model: Transformer, *, slots: int, max_context: int, compile: bool) -> None:
        self.slots = slots
        self.max_context = max_context
        self._model = model
        self._cache = KVCache(model.spec, slots, max_context, model.dtype)
        self._steps = DecodeSteps(model, compile=compile)
        self._tokens = mx.zeros((slots,), mx.int32)
        self._params = [_IDLE] * slots
        self._sampling: dict[int, tuple[SamplingMode, SamplingArrays]] = {}

    @property
    def architecture(self) -> str:
        return self._model.spec.architecture

    @property
    def vocab_size(self) -> int:
        return self._model.spec.vocab_size

    @property
    def weight_bytes(self) -> int:
        return self._model.nbytes

    @property
    def cache_bytes(self) -> int:
        return self._cache.nbytes

    @property
    def traces(self) -> int:
        """How often a decode step was traced; once a shape when all is well."""
        return self._steps.traces

    def prefill(self, rows: Sequence[PrefillRow]) -> Pending:
        """Runs pieces of prompts side by side, padded to the longest."""
        length = max(len(row.tokens) for row in rows)
        place = Place(
            rows=_slots_of(rows),
            starts=mx.array([row.start for row in rows], dtype=mx.int32),
            length=length,
            window=self._cache.window(max(row.start for row in rows) + length),
        )
        tokens = mx.array([[*row.tokens, *[0] * (length - len(row.tokens))] for row in rows], dtype=mx.int32)
        cache = self._cache
        hidden = self._model.forward(tokens, place, cache.keys, cache.values)
        first = self._sample_first(hidden, rows)
        barrier = hidden[:, -1, :1]
        self._dispatch(first, barrier)
        return Pending(first, first.shape[0], barrier)

    def _sample_first(self, hidden: mx.array, rows: Sequence[PrefillRow]) -> mx.array:
        """Samples for the rows whose prompt is complete; sets their slots up for decoding."""
        last = [(index, row) for index, row in enumerate(rows) if row.sampling is not None]
        if not last:
            return mx.zeros((0,), mx.int32)
        params = [row.sampling for _, row in last if row.sampling is not None]
        at = (
            mx.array([index for index, _ in last]),
            mx.array([len(row.tokens) - 1 for _, row in last]),
        )
        positions = mx.array([row.start + len(row.tokens) - 1 for _, row in last], dtype=mx.int32)
        logits = self._model.logits(hidden[at])
        tokens = sample(logits, positions, SamplingArrays.of(params), SamplingMode.of(params))
        slots = [row.slot for _, row in last]
        self._tokens[mx.array(slots)] = tokens
        for slot, param in zip(slots, params, strict=True):
            self._params[slot] = param
        self._sampling.clear()
        return tokens

    def decode(self, positions: Sequence[int | None]) -> Pending:
        """One step for slots 0..n-1; ``positions[i]`` is where slot i's pending token is written.

        None is a slot that does not decode, idle or in the middle of its prompt. Its row is computed all the
        same and writes at the last position, which a sequence reads only in the step that writes it.
        """
        rows = self._bucket(len(positions))
        mode, sampling = self._sampling_of(rows)
        scratch = self.max_context - 1
        at = [scratch if position is None else position for position in positions]
        padded = mx.array(at + [scratch] * (rows - len(at)), dtype=mx.int32)
        window = self._cache.window(max(position for position in positions if position is not None) + 1)
        shape = StepShape(rows, window, mode)
        cache = self._cache
        self._tokens = self._steps(shape, self._tokens, padded, sampling, cache.keys, cache.values)
        self._dispatch()
        return Pending(self._tokens, len(positions))

    def move(self, source: int, target: int, tokens: int) -> None:
        """Moves a running sequence, ``tokens`` positions long, to another slot."""
        self._cache.move(source, target, tokens)
        self._tokens[target] = self._tokens[source]
        self._params[target], self._params[source] = self._params[source], _IDLE
        self._sampling.clear()

    def release(self, slot: int) -> None:
        """The slot's sequence has ended: it no longer asks for a sampling stage."""
        self._params[slot] = _IDLE
        self._sampling.clear()

    def close(self) -> None:
        """Frees the model. The thread's streams go too: MLX aborts if the process ends before they do."""
        mx.synchronize()
        del self._model, self._cache, self._steps, self._tokens, self._sampling
        mx.clear_cache()
        mx.clear_streams()

    def _dispatch(self, *results: mx.array) -> None:
        """Starts computing. All state is among it: what nobody evaluates piles up, a buffer a step."""
        cache = self._cache
        mx.async_eval(*results, self._tokens, *cache.keys, *cache.values)  # type: ignore[no-untyped-call]

    def _bucket(self, rows: int) -> int:
        bucket = 1
        while bucket < rows:
            bucket *= 2
        return min(bucket, self.slots)

    def _sampling_of(self, rows: int) -> tuple[SamplingMode, SamplingArrays]:
        if rows not in self._sampling:
            params = self._params[:rows]
            self._sampling[rows] = (SamplingMode.of(params), SamplingArrays.of(params))
        return self._sampling[rows]


def _slots_of(rows: Sequence[PrefillRow]) -> slice | mx.array:
    """Neighbouring slots as a slice, which reads the cache without a copy."""
    slots = [row.slot for row in rows]
    if slots == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return mx.array(slots, dtype=mx.int32)
