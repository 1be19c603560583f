"""Attention on a CPU: the size of the pieces that it is computed in never shows."""

from __future__ import annotations

import mlx.core as mx
import pytest

from emlxd.graph import attention
from emlxd.graph.attention import CpuAttention, Place, Scoring
from tests.device import only_on_cpu

pytestmark = only_on_cpu("a GPU has attention of its own")


@pytest.mark.parametrize("case", ["plain", "soft cap", "sinks", "bias"])
def test_pieces_of_a_prompt_are_as_good_as_the_whole(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    mx.random.seed(0)
    batch, heads, shared, length, window, dim = 2, 4, 2, 45, 256, 16
    q = mx.random.normal((batch, heads, length, dim))
    k, v = (mx.random.normal((batch, shared, window, dim)) for _ in range(2))
    place = Place(slice(0, batch), mx.array([3, 100], mx.int32), length, window, None)
    scoring = Scoring(
        0.25,
        soft_cap=5.0 if case == "soft cap" else 0.0,
        sinks=mx.random.normal((heads,)) if case == "sinks" else None,
    )
    bias = mx.random.normal((batch, heads, length, window)) if case == "bias" else None
    attend = CpuAttention(compile=True)
    made = []
    for scores in (1 << 30, 1):
        monkeypatch.setattr(attention, "SCORES", scores)
        made.append(attend(q, k, v, attend.mask(place, 60), scoring, bias))
        mx.eval(made)
    whole, pieces = made
    assert mx.allclose(whole, pieces, rtol=1e-5, atol=1e-5)
