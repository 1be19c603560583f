"""Choosing the next token, inside the graph and for all slots at once.

A batch pays for what its requests ask: ``SamplingMode`` says which stages are traced. A stage leaves a
row alone whose parameters are at their defaults, so a request samples the same in any company.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from emlxd.core import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingMode:
    """The stages that a step needs. The default is greedy: a plain arg-max."""

    random: bool = False
    top_k_or_p: bool = False

    @staticmethod
    def of(params: Sequence[SamplingParams]) -> SamplingMode:
        random = [p for p in params if not p.greedy]
        return SamplingMode(
            random=bool(random),
            top_k_or_p=any(p.top_k > 0 or p.top_p < 1 for p in random),
        )


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """The parameters of b rows on the device: float32 [b, 1] each, seeds uint32 [b]."""

    temperature: mx.array
    top_p: mx.array
    top_k: mx.array
    min_p: mx.array
    seeds: mx.array

    @staticmethod
    def of(params: Sequence[SamplingParams]) -> SamplingArrays:
        def column(values: list[float]) -> mx.array:
            return mx.array(values, dtype=mx.float32)[:, None]

        return SamplingArrays(
            column([p.temperature for p in params]),
            column([p.top_p for p in params]),
            column([float(p.top_k) for p in params]),
            column([p.min_p for p in params]),
            mx.array([fold_seed(p.seed or 0) for p in params], dtype=mx.uint32),
        )

    def list(self) -> list[mx.array]:
        return [self.temperature, self.top_p, self.top_k, self.min_p, self.seeds]


def fold_seed(seed: int) -> int:
    """A 64-bit seed, also a negative one, as the 32 bits that the generator takes."""
    seed &= (1 << 64) - 1
    return (seed ^ (seed >> 32) * 0x9E3779B1) & 0xFFFFFFFF


def sample(logits: mx.array, positions: mx.array, arrays: SamplingArrays, mode: SamplingMode) -> mx.array:
    """logits float32 [b, vocab], positions int32 [b] -> tokens int32 [b].

    Randomness depends on a row's seed and position alone: Gumbel noise is added and the largest value
    taken, which draws from the softmax and shrugs off the rounding that differs between batch sizes.
    """
    best = mx.argmax(logits, axis=-1)
    if not mode.random:
        return best.astype(mx.int32)
    greedy = arrays.temperature == 0
    scaled = logits / mx.where(greedy, 1.0, arrays.temperature)
    scaled = _keep_min_p(scaled, arrays.min_p)
    if mode.top_k_or_p:
        scaled = _keep_top(scaled, arrays.top_k, arrays.top_p)
    drawn = mx.argmax(scaled + _gumbel(arrays.seeds, positions, logits.shape[-1]), axis=-1)
    return mx.where(greedy.squeeze(-1), best, drawn).astype(mx.int32)


def _keep_min_p(logits: mx.array, min_p: mx.array) -> mx.array:
    """Keeps tokens at least ``min_p`` times as likely as the likeliest."""
    return mx.where(logits >= logits.max(axis=-1, keepdims=True) + mx.log(min_p), logits, -mx.inf)


def _keep_top(logits: mx.array, top_k: mx.array, top_p: mx.array) -> mx.array:
    """Keeps the ``top_k`` likeliest, and of these the fewest whose probabilities reach ``top_p``.

    Tokens tied with the last one kept are kept too.
    """
    ranked = -mx.sort(-logits, axis=-1)
    ranks = mx.arange(logits.shape[-1], dtype=mx.float32)
    ranked = mx.where((ranks < top_k) | (top_k == 0), ranked, -mx.inf)
    probabilities = mx.softmax(ranked, axis=-1)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    kept = mx.where((before < top_p) | (top_p >= 1), ranked, mx.inf)
    return mx.where(logits >= kept.min(axis=-1, keepdims=True), logits, -mx.inf)


def _gumbel(seeds: mx.array, positions: mx.array, vocab: int) -> mx.array:
    """float32 [b, vocab], row by row from the key (seed, position)."""
    keys = mx.stack([seeds, positions.astype(mx.uint32)], axis=-1)
    return mx.vmap(lambda key: mx.random.gumbel((vocab,), key=key))(keys)
