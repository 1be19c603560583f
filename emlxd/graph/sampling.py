"""Choosing the next token, inside the graph and for all rows at once.

A batch pays for what its requests ask: ``SamplingMode`` says which stages are traced. A stage leaves a
row alone whose parameters are at their defaults, so a request samples the same in any company.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import mlx.core as mx

from emlxd.core import SamplingParams, TokenLogprob
from emlxd.graph.cpu_math import exp

MAX_LOGPROBS: Final = 20
BLOCK: Final = 32  # logits whose highest is found first
# Columns of ``Rows["params"]``.
TEMPERATURE, TOP_P, TOP_K, MIN_P, PRESENCE, FREQUENCY, REPETITION = range(7)

# What ``sample`` reads of b rows, by name; a stage that is off needs none of its arrays.
#   params   float32 [b, 7]        always but for greedy
#   seeds    uint32  [b]           random
#   bias     float32 [b, vocab]    bias: added to the logits
#   until    int32   [b]           bias: no end token is sampled at an earlier position
#   ends     float32 [vocab]       bias: -inf at end tokens
#   counts   int32   [b, vocab]    penalties: how often a token is in the answer
#   seen     bool    [b, vocab]    penalties: whether it is in the prompt
#   allowed  uint32  [b, vocab/32] masked: a bit for each token that may come
Rows = Mapping[str, mx.array]


@dataclass(frozen=True, slots=True)
class SamplingMode:
    """The stages that a step needs. The default is greedy: a plain arg-max."""

    random: bool = False
    min_p: bool = False
    top_k_or_p: bool = False
    penalties: bool = False
    bias: bool = False
    masked: bool = False
    logprobs: bool = False

    @staticmethod
    def of(params: Sequence[SamplingParams]) -> SamplingMode:
        random = [p for p in params if not p.greedy]
        return SamplingMode(
            random=bool(random),
            min_p=any(p.min_p > 0 for p in random),
            top_k_or_p=any(p.top_k > 0 or p.top_p < 1 for p in random),
            penalties=any(p.penalized for p in params),
            bias=any(p.logit_bias or p.min_tokens for p in params),
            logprobs=any(p.logprobs is not None for p in params),
        )

    def with_mask(self, masked: bool) -> SamplingMode:
        return replace(self, masked=masked)


def param_row(p: SamplingParams) -> list[float]:
    """One row of ``params``."""
    return [
        p.temperature,
        p.top_p,
        float(p.top_k),
        p.min_p,
        p.presence_penalty,
        p.frequency_penalty,
        p.repetition_penalty,
    ]


def fold_seed(seed: int) -> int:
    """A 64-bit seed, also a negative one, as the 32 bits that the generator takes."""
    seed &= (1 << 64) - 1
    return (seed ^ (seed >> 32) * 0x9E3779B1) & 0xFFFFFFFF


def sample(logits: mx.array, positions: mx.array, rows: Rows, mode: SamplingMode) -> mx.array:
    """logits float32 [b, vocab], positions int32 [b] of the tokens that they follow -> tokens int32 [b].

    Randomness depends on a row's seed and position alone: Gumbel noise is added and the largest value
    taken, which draws from the softmax and shrugs off the rounding that differs between batch sizes.
    """
    if mode.masked:
        logits = mx.where(_unpacked(rows["allowed"], logits.shape[-1]), logits, -mx.inf)
    if mode.bias:
        early = (positions < rows["until"])[:, None]
        logits = logits + rows["bias"] + mx.where(early, rows["ends"], 0.0)
    if mode.penalties:
        logits = _penalize(logits, rows)
    best = mx.argmax(logits, axis=-1)
    if not mode.random:
        return best.astype(mx.int32)
    temperature = _column(rows, TEMPERATURE)
    greedy = temperature == 0
    logits = logits / mx.where(greedy, 1.0, temperature)
    if mode.min_p:
        logits = _keep_min_p(logits, _column(rows, MIN_P))
    if mode.top_k_or_p:
        logits = _keep_top(logits, _column(rows, TOP_K), _column(rows, TOP_P))
    drawn = mx.argmax(logits + _gumbel(rows["seeds"], positions, logits.shape[-1]), axis=-1)
    return mx.where(greedy.squeeze(-1), best, drawn).astype(mx.int32)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of b tokens, float32 [b], and of the likeliest beside them, [b, 20] in no order."""

    chosen: mx.array
    top_tokens: mx.array
    top: mx.array

    def rows(self, tokens: Sequence[int], wanted: Sequence[int | None]) -> list[TokenLogprob | None]:
        """Read from the device. ``wanted`` is how many of the likeliest a row asks for, None for nothing."""
        chosen, top_tokens, top = (
            cast("list[Any]", a.tolist()) for a in (self.chosen, self.top_tokens, self.top)
        )
        rows: list[TokenLogprob | None] = []
        for row, (token, count) in enumerate(zip(tokens, wanted, strict=True)):
            if count is None:
                rows.append(None)
                continue
            likeliest = sorted(zip(top_tokens[row], top[row], strict=True), key=lambda pair: -pair[1])
            rows.append(TokenLogprob(token, chosen[row], tuple(likeliest[:count])))
        return rows


def logprobs(logits: mx.array, tokens: mx.array) -> Logprobs:
    """Of the plain softmax of ``logits`` [b, vocab], whatever else took part in choosing ``tokens`` [b]."""
    top = logits.max(axis=-1, keepdims=True)
    total = top + mx.log(exp(logits - top).sum(axis=-1, keepdims=True))
    likeliest = _likeliest(logits, min(MAX_LOGPROBS, logits.shape[-1]))
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1) - total
    return Logprobs(
        chosen.squeeze(-1),
        likeliest,
        mx.take_along_axis(logits, likeliest, axis=-1) - total,
    )


def _likeliest(logits: mx.array, count: int) -> mx.array:
    """int32 [b, count], in no order. They are in the ``count`` blocks with the highest maxima, so only those
    are searched."""
    rows, vocab = logits.shape
    blocks = mx.pad(logits, [(0, 0), (0, -vocab % BLOCK)], constant_values=-mx.inf).reshape(rows, -1, BLOCK)
    best = _highest(blocks.max(axis=-1), min(count, blocks.shape[1]))
    candidates = mx.take_along_axis(blocks, best[..., None], axis=1).reshape(rows, -1)
    tokens = (best[..., None] * BLOCK + mx.arange(BLOCK, dtype=mx.int32)).reshape(rows, -1)
    return mx.take_along_axis(tokens, _highest(candidates, count), axis=-1)


def _highest(x: mx.array, count: int) -> mx.array:
    """Where the ``count`` highest of the last axis are, int32, in no order."""
    return mx.argpartition(x, -count, axis=-1)[..., -count:].astype(mx.int32)


def _column(rows: Rows, index: int) -> mx.array:
    return rows["params"][:, index : index + 1]


def _unpacked(bits: mx.array, vocab: int) -> mx.array:
    """uint32 [b, words] -> bool [b, vocab]; token t is bit t % 32 of word t / 32."""
    spread = (bits[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return spread.reshape(bits.shape[0], -1)[:, :vocab].astype(mx.bool_)


def _penalize(logits: mx.array, rows: Rows) -> mx.array:
    """Presence and frequency penalties count the answer (OpenAI); repetition counts the prompt too (CTRL)."""
    counts = rows["counts"]
    repetition = _column(rows, REPETITION)
    repeated = (counts > 0) | rows["seen"]
    logits = mx.where(repeated, mx.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - counts * _column(rows, FREQUENCY) - (counts > 0) * _column(rows, PRESENCE)


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
    kept = mx.where(((before < top_p) | (top_p >= 1)) & (ranked > -mx.inf), ranked, mx.inf)
    return mx.where(logits >= kept.min(axis=-1, keepdims=True), logits, -mx.inf)


def _gumbel(seeds: mx.array, positions: mx.array, vocab: int) -> mx.array:
    """float32 [b, vocab], row by row from the key (seed, position)."""
    keys = mx.stack([seeds, positions.astype(mx.uint32)], axis=-1)
    return mx.vmap(lambda key: mx.random.gumbel((vocab,), key=key))(keys)
