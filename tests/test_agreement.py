"""What the tests take for the same on a CPU and on a GPU."""

from __future__ import annotations

import mlx.core as mx
import pytest

from emlxd.core import SamplingParams
from tests import agreement, device
from tests.agreement import GREEDY, assert_drawn, assert_greedy, assert_same, bound, close


@pytest.fixture(params=["cpu", "gpu"])
def named(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device that the tests take themselves to be on."""
    monkeypatch.setattr(device, "current", lambda: request.param)
    return str(request.param)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_every_dtype_has_its_tolerance(named: str, dtype: mx.Dtype) -> None:
    row = agreement.TOLERANCES[dtype]
    expected = mx.array([10.0, -1.0, 0.0])
    assert close(expected + 9.9 * row, expected, dtype=dtype)
    assert not close(expected + 10.2 * row, expected, dtype=dtype)
    assert bound(10.0, dtype=dtype) == 10 * row
    assert bound(10.0, on_cpu=100.0, dtype=dtype) == 100
    assert bound(10.0, on_cpu=1e-9, dtype=dtype) == (1e-9 if named == "cpu" else 10 * row)


def test_numbers_of_another_shape_or_none_at_all_are_not_close() -> None:
    assert not close([1.0, float("nan")], [1.0, 2.0])
    with pytest.raises(AssertionError):
        close([1.0], [1.0, 1.0])


class Ladder:
    """A model: token n is followed by n + 1, and next to as likely by n + 2."""

    layers = ()

    def __init__(self, gap: float) -> None:
        self.gap = gap

    def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
        ids, next = mx.arange(16), tokens[..., None] + 1
        return mx.where(ids == next, 10.0, mx.where(ids == next + 1, 10.0 - self.gap, 0.0))


def test_greedy_tokens_are_the_oracle_s(named: str) -> None:
    assert_greedy(Ladder(1.0), [1, 2], [3, 4, 5])
    with pytest.raises(AssertionError):
        assert_greedy(Ladder(1.0), [1, 2], [3, 5, 6])


def test_on_a_gpu_either_of_two_tokens_within_the_tolerance_is_right(named: str) -> None:
    oracle = Ladder(gap=2e-5 * 10)
    if named == "gpu":
        assert_greedy(oracle, [1, 2], [3, 5, 6])
        assert_same([3, 5, 6], [4, 5, 7], oracle, [1, 2])
        with pytest.raises(AssertionError):
            assert_same([3, 5, 6], [3, 5, 8], oracle, [1, 2])
    else:
        with pytest.raises(AssertionError):
            assert_greedy(oracle, [1, 2], [3, 5, 6])
        with pytest.raises(AssertionError):
            assert_same([3, 5, 6], [4, 5, 7], oracle, [1, 2])


def test_sampled_tokens_are_those_of_their_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current", lambda: "gpu")
    flat = Flat()
    params = SamplingParams(temperature=1.0, seed=4)
    answer = flat.answer([1, 2], params, 12)
    assert len(set(answer)) > 3
    assert_drawn(flat, [1, 2], answer, params)
    for other in (SamplingParams(temperature=1.0, seed=5), GREEDY):
        with pytest.raises(AssertionError):
            assert_drawn(flat, [1, 2], answer, other)


class Flat:
    """A model to which all tokens are the same, but for a little."""

    layers = ()

    def __call__(self, tokens: mx.array) -> mx.array:
        return mx.sin(tokens[..., None] * mx.arange(16))

    def answer(self, prompt: list[int], params: SamplingParams, count: int) -> list[int]:
        """Drawn one after the other."""
        answer: list[int] = []
        for _ in range(count):
            logits = self(mx.array([[*prompt, *answer]]))[0, len(prompt) - 1 :]
            answer.append(agreement._drawn(logits, prompt, [*answer, 0], params)[-1])
        return answer
