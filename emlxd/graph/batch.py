"""What a worker asks of the runner, and what it gets. Plain data, so that a fake runner needs no MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from emlxd.core import SamplingParams, TokenLogprob

BLOCK_TOKENS: Final = 64  # the prefix cache's unit


@dataclass(frozen=True, slots=True)
class Begin:
    """How a slot samples from the end of its prompt on. ``answer`` is what it had already, if it is resumed.

    ``allowed`` is the bit mask for the first token: little-endian uint32 words, a bit for each token.
    """

    sampling: SamplingParams
    prompt: tuple[int, ...]
    answer: tuple[int, ...] = ()
    allowed: bytes | None = None


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A piece of a prompt: ``tokens`` go to ``slot`` from position ``start`` on, with ``adapter`` or 0.

    The last piece has ``begin``, and the next token is sampled. ``targets`` asks for log-probabilities:
    they are the tokens that follow each of ``tokens``.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    begin: Begin | None = None
    targets: tuple[int, ...] = ()
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step sampled, by row. ``scores`` holds the log-probabilities of ``PrefillRow.targets``."""

    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprob | None] | None = None
    scores: Sequence[Sequence[TokenLogprob]] = ()
