"""What a worker asks of the runner. Plain data, so that a fake runner needs no MLX."""

from __future__ import annotations

from dataclasses import dataclass

from emlxd.core import SamplingParams


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A piece of a prompt: ``tokens`` go to ``slot`` from position ``start`` on.

    With ``sampling`` it is the prompt's last piece, and the first token of the answer is sampled.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    sampling: SamplingParams | None
