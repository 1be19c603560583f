"""The decode step: one token for each running slot, compiled once per shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from emlxd.graph.attention import Place
from emlxd.graph.cuda.fused_decoder import FusedDecoder
from emlxd.graph.cuda.pairs import in_pairs
from emlxd.graph.kv_cache import KVCache, LayerArrays
from emlxd.graph.sampling import Logprobs, Rows, SamplingMode, logprobs, sample
from emlxd.graph.step_context import Advance
from emlxd.graph.transformer import Transformer

Forward = Callable[[mx.array, Rows, LayerArrays], tuple[mx.array, LayerArrays]]
"""Tokens, ``StepRows.arrays`` and what the layers keep -> logits and what they keep then."""

Split = Callable[[mx.array, int], list[mx.array]]
"""Tokens int32 [slots] and how many of them are a step's -> ``Sampled.parts``."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What sampling gives: ``tokens`` int32 [slots] for the next step, and what else its mode asks for.

    ``parts`` is for the host: int32 arrays that together begin with the tokens of the step's rows.
    """

    tokens: mx.array
    parts: Sequence[mx.array]
    logprobs: Logprobs | None = None
    counts: mx.array | None = None

    @staticmethod
    def of(arrays: Mapping[str, mx.array], parts: Sequence[mx.array]) -> Sampled:
        """From the form in which they leave a compiled function."""
        found = Logprobs(arrays["chosen"], arrays["top_tokens"], arrays["top"]) if "top" in arrays else None
        return Sampled(arrays["tokens"], parts, found, arrays.get("counts"))


@dataclass(frozen=True, slots=True)
class StepRows:
    """The slots 0..b-1 of a step: where each writes, and how many tokens it has, 1 or 0 (int32 [b]).

    ``adapters`` as in ``Place``.
    """

    window: int
    positions: mx.array
    lengths: mx.array
    adapters: mx.array | None = None

    @property
    def count(self) -> int:
        return self.positions.shape[0]

    @property
    def shape(self) -> tuple[int, int, bool]:
        """What a trace depends on."""
        return self.window, self.count, self.adapters is not None

    @property
    def arrays(self) -> dict[str, mx.array]:
        """The form in which they go into a compiled function."""
        adapters = {} if self.adapters is None else {"adapters": self.adapters}
        return {"positions": self.positions, "lengths": self.lengths} | adapters


class DecodeSteps:
    """The parts of a decode step in every shape asked for so far, each traced once."""

    def __init__(self, model: Transformer, *, compile: bool, fused: FusedDecoder | None = None) -> None:
        """``fused`` computes the forward pass of the steps that it takes."""
        self._model = model
        self._fused = fused
        self._split = in_pairs if fused else _whole
        self._compile = compile
        self._built: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self.traces = 0

    def step(
        self,
        mode: SamplingMode,
        rows: StepRows,
        tokens: mx.array,
        slots: Rows,
        cache: KVCache,
    ) -> tuple[Sampled, mx.array]:
        """Forward and sampling in one graph. tokens int32 [slots]. With the rows' next positions, int32 [b].

        The cache's arrays are replaced: nothing else may hold the old ones when the result is evaluated, or
        each would be copied.
        """
        run = self._build(("step", mode, rows.shape), lambda: _joined(self._forward(rows), mode, self._split))
        sampled, parts, after, cache.layers = run(tokens, rows.arrays, dict(slots), cache.layers)
        return Sampled.of(sampled, parts), after

    def forward(self, rows: StepRows, tokens: mx.array, cache: KVCache) -> mx.array:
        """The first half of a step, whose masks are not known yet: logits float32 [b, vocab]."""
        run = self._build(("forward", rows.shape), lambda: self._forward(rows))
        logits: mx.array
        logits, cache.layers = run(tokens, rows.arrays, cache.layers)
        return logits

    def sample(
        self, mode: SamplingMode, logits: mx.array, tokens: mx.array, positions: mx.array, slots: Rows
    ) -> Sampled:
        """The second half."""
        key = ("sample", mode, positions.shape[0])
        sampled = self._build(key, lambda: _sample(mode))(logits, tokens, positions, dict(slots))
        return Sampled.of(sampled, [sampled["tokens"]])

    def verify(
        self,
        mode: SamplingMode,
        rows: StepRows,
        tokens: mx.array,
        drafts: mx.array,
        slots: Rows,
        cache: KVCache,
    ) -> tuple[mx.array, mx.array]:
        """A step over the pending tokens and ``drafts`` int32 [b, width] after them, -1 where there is none.

        Gives tokens int32 [slots] as ``step`` does, and int32 [b, width + 1]: what is sampled after the
        pending token and after each drafted one. They hold up to the first that differs from its draft.
        """
        key = ("verify", mode, rows.shape, drafts.shape)
        run = self._build(key, lambda: _verify(self._model, mode, rows.window))
        arrays, cache.layers = run(tokens, drafts, rows.arrays, dict(slots), cache.layers)
        return arrays["tokens"], arrays["sampled"]

    def _forward(self, rows: StepRows) -> Forward:
        if self._fused and self._fused.takes(rows.count):
            return _forward_fused(self._model, self._fused, rows.window)
        return _forward(self._model, rows.window)

    def _build(self, key: tuple[Any, ...], make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        if key not in self._built:
            function = make()

            def traced(*arguments: Any) -> Any:
                self.traces += 1
                return function(*arguments)

            self._built[key] = mx.compile(traced) if self._compile else traced
        return self._built[key]


def _joined(forward: Forward, mode: SamplingMode, split: Split) -> Callable[..., Any]:
    pick = _sample(mode)

    def step(
        tokens: mx.array, rows: Rows, slots: Rows, kept: LayerArrays
    ) -> tuple[dict[str, mx.array], list[mx.array], mx.array, LayerArrays]:
        positions = rows["positions"]
        logits, kept = forward(tokens, rows, kept)
        sampled = pick(logits, tokens, positions, slots)
        return sampled, split(sampled["tokens"], positions.shape[0]), positions + rows["lengths"], kept

    return step


def _whole(tokens: mx.array, count: int) -> list[mx.array]:
    return [tokens]


def _place(rows: Rows, length: int, window: int, lengths: mx.array | None) -> Place:
    """Of the first slots, all of which are past their prompts."""
    positions = rows["positions"]
    return Place(
        rows=slice(0, positions.shape[0]),
        starts=positions,
        length=length,
        window=window,
        lengths=lengths,
        adapters=rows.get("adapters"),
        may_begin=False,
    )


def _forward_fused(model: Transformer, fused: FusedDecoder, window: int) -> Forward:
    def forward(tokens: mx.array, rows: Rows, kept: LayerArrays) -> tuple[mx.array, LayerArrays]:
        count = rows["positions"].shape[0]
        logits = fused.logits(tokens[:count], rows["positions"], rows["lengths"], window, kept)
        return model.scaled(logits), kept

    return forward


def _forward(model: Transformer, window: int) -> Forward:
    def forward(tokens: mx.array, rows: Rows, kept: LayerArrays) -> tuple[mx.array, LayerArrays]:
        count = rows["positions"].shape[0]
        kept = [list(layer) for layer in kept]
        place = _place(rows, 1, window, rows["lengths"])
        hidden = model.forward(tokens[:count, None], place, kept)
        return model.logits(hidden[:, 0]), kept

    return forward


def _sample(mode: SamplingMode) -> Callable[..., dict[str, mx.array]]:
    def pick(logits: mx.array, tokens: mx.array, positions: mx.array, slots: Rows) -> dict[str, mx.array]:
        rows = positions.shape[0]
        own = {name: array if name == "ends" else array[:rows] for name, array in slots.items()}
        chosen = sample(logits, positions, own, mode)
        result = {"tokens": mx.concatenate([chosen, tokens[rows:]])}
        if mode.penalties:
            result["counts"] = slots["counts"].at[mx.arange(rows), chosen].add(1)
        if mode.logprobs:
            found = logprobs(logits, chosen)
            result |= {"chosen": found.chosen, "top_tokens": found.top_tokens, "top": found.top}
        return result

    return pick


def _verify(model: Transformer, mode: SamplingMode, window: int) -> Callable[..., Any]:
    def verify(
        tokens: mx.array, drafts: mx.array, rows: Rows, slots: Rows, kept: LayerArrays
    ) -> tuple[dict[str, mx.array], LayerArrays]:
        count, width = drafts.shape
        length = width + 1
        kept = [list(layer) for layer in kept]
        later: list[Advance] = []
        fed = mx.concatenate([tokens[:count, None], mx.maximum(drafts, 0)], axis=1)
        place = _place(rows, length, window, None)
        logits = model.logits(model.forward(fed, place, kept, later)).flatten(0, 1)
        spread = {
            name: array if name == "ends" else mx.repeat(array[:count], length, axis=0)
            for name, array in slots.items()
        }
        sampled = sample(logits, place.positions.flatten(), spread, mode).reshape(count, length)
        right = mx.cumprod((sampled[:, :-1] == drafts).astype(mx.int32), axis=1).sum(axis=1, keepdims=True)
        following = mx.take_along_axis(sampled, right, axis=1).squeeze(1)
        for advance in later:
            advance(rows["lengths"] * (right.squeeze(1) + 1))
        arrays = {"tokens": mx.concatenate([following, tokens[count:]]), "sampled": sampled}
        return arrays, kept

    return verify
