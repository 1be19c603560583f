"""What a prefill step is made of: pieces of prompts side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import mlx.core as mx

from emlxd.graph.attention import Place
from emlxd.graph.batch import PrefillRow
from emlxd.graph.kv_cache import KVCache
from emlxd.graph.pending import Scored
from emlxd.graph.sampling import logprobs
from emlxd.graph.transformer import Transformer

SCORED_AT_ONCE: Final = 16  # positions: each costs a row of the whole vocabulary


def tokens_of(rows: Sequence[PrefillRow]) -> mx.array:
    """int32 [rows, the longest]; the others are padded."""
    length = max(len(row.tokens) for row in rows)
    return mx.array([[*row.tokens, *[0] * (length - len(row.tokens))] for row in rows], dtype=mx.int32)


def place_of(rows: Sequence[PrefillRow], cache: KVCache) -> Place:
    length = max(len(row.tokens) for row in rows)
    adapters = [row.adapter for row in rows]
    return Place(
        rows=_slots_of(rows),
        starts=mx.array([row.start for row in rows], dtype=mx.int32),
        length=length,
        window=cache.exact_window(max(row.start for row in rows) + length),
        lengths=mx.array([len(row.tokens) for row in rows], dtype=mx.int32),
        adapters=mx.array(adapters, dtype=mx.int32) if any(adapters) else None,
    )


def _slots_of(rows: Sequence[PrefillRow]) -> slice | mx.array:
    """Neighbouring slots as a slice, which reads the cache without a copy."""
    slots = [row.slot for row in rows]
    if slots == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return mx.array(slots, dtype=mx.int32)


def score(model: Transformer, hidden: mx.array, targets: Sequence[int]) -> list[Scored]:
    """Log-probabilities of ``targets`` after each of ``hidden`` [L, D].

    Evaluated part by part, since the logits of a whole chunk may be a gigabyte.
    """
    parts = []
    for start in range(0, len(targets), SCORED_AT_ONCE):
        some = tuple(targets[start : start + SCORED_AT_ONCE])
        logits = model.logits(hidden[start : start + len(some)])
        found = logprobs(logits, mx.array(some, dtype=mx.int32))
        mx.eval(found.chosen, found.top_tokens, found.top)
        parts.append(Scored(some, found))
    return parts
