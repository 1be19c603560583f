"""How near to each other two ways to compute the same must come, on the device of ``EMLXD_TEST_DEVICE``.

mlx-lm, the oracle, computes on the CPU: on CUDA its models with experts do not always give the same twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from emlxd.core import SamplingParams
from emlxd.graph.batch import Begin
from emlxd.graph.sampling import sample
from emlxd.graph.slots import SlotSampling
from tests import device

GREEDY: Final = SamplingParams(temperature=0.0)

TOLERANCES: Final[Mapping[mx.Dtype, float]] = {
    # 24 bits of mantissa: what is left is that sums are taken in another order, 1.4e-5 at most on a GPU.
    mx.float32: 5e-5,
    mx.float16: 2e-2,  # 11 bits: by up to 1.1e-2
    mx.bfloat16: 8e-2,  # 8 bits: by up to 5e-2
}
"""The most that rounding may change a value, as a share of the largest, in models of a few layers."""


def bound(scale: float, *, on_cpu: float | None = None, dtype: mx.Dtype = mx.float32) -> float:
    """The largest difference to values of about ``scale``.

    ``on_cpu`` is that of a comparison which knows it better on a CPU. It is the least elsewhere.
    """
    if on_cpu is not None and device.current() == "cpu":
        return on_cpu
    return max(on_cpu or 0.0, TOLERANCES[dtype] * scale)


def close(found: Any, expected: Any, *, on_cpu: float | None = None, dtype: mx.Dtype = mx.float32) -> bool:
    """Whether nothing is further off than ``bound`` allows for the largest of what is expected."""
    found, expected = _float32(found), _float32(expected)
    assert found.shape == expected.shape
    limit = bound(float(np.abs(expected).max()), on_cpu=on_cpu, dtype=dtype)
    return bool((np.abs(found - expected) <= limit).all())  # so that NaN is wrong


def assert_greedy(oracle: Any, prompt: list[int], answer: Sequence[int]) -> None:
    """``answer`` is what ``oracle``, a model of mlx-lm's, says to ``prompt``: see ``assert_drawn``."""
    if device.current() == "cpu":
        assert list(answer) == oracle_greedy(oracle, prompt, len(answer))
    else:
        assert_drawn(oracle, prompt, answer, GREEDY)


def assert_same(
    one: Sequence[int],
    other: Sequence[int],
    oracle: Any,
    prompt: list[int],
    sampling: SamplingParams = GREEDY,
) -> None:
    """Two answers to one prompt are the same token for token; on a GPU both may be the oracle's instead."""
    if device.current() == "cpu":
        assert list(one) == list(other)
        return
    for answer in (one, other):
        assert_drawn(oracle, prompt, answer, sampling)


def assert_drawn(oracle: Any, prompt: list[int], answer: Sequence[int], sampling: SamplingParams) -> None:
    """Every token is what ``sampling`` draws from the oracle's logits, given all tokens before it.

    Or would be if its own logit were higher by as much as rounding may have taken from it and given to
    another: where two tokens are closer than that, either is right.
    """
    assert answer
    logits = oracle_logits(oracle, [*prompt, *answer])[len(prompt) - 1 : -1]
    slack = bound(float(mx.abs(logits).max()))
    raised = logits + slack * (mx.arange(logits.shape[-1]) == mx.array(list(answer))[:, None])
    drawn = _drawn(raised, prompt, answer, sampling)
    wrong = [place for place, token in enumerate(answer) if drawn[place] != token]
    assert not wrong, (wrong, drawn, answer)


def oracle_logits(model: Any, tokens: list[int]) -> mx.array:
    """float32 [len(tokens), vocab], computed at once."""
    with mx.stream(mx.cpu):
        logits: mx.array = model(mx.array([tokens]))[0].astype(mx.float32)
    mx.eval(logits)
    return logits


def oracle_greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """The likeliest tokens, computed one after the other."""
    cache, out, step = make_prompt_cache(model), [], tokens
    with mx.stream(mx.cpu):
        for _ in range(count):
            step = [int(mx.argmax(model(mx.array([step]), cache=cache)[0, -1]))]
            out += step
    return out


def _drawn(logits: mx.array, prompt: list[int], answer: Sequence[int], sampling: SamplingParams) -> list[int]:
    """What is drawn from each row of ``logits`` after as many tokens of the answer."""
    rows, vocab = logits.shape
    slots = SlotSampling(rows, vocab, ())
    for row in range(rows):
        slots.begin(row, Begin(sampling, tuple(prompt), tuple(answer[:row])))
    mode = slots.mode(slice(0, rows))
    positions = mx.arange(len(prompt) - 1, len(prompt) - 1 + rows, dtype=mx.int32)
    return sample(logits, positions, slots.arrays(mode), mode).tolist()  # type: ignore[return-value]


def _float32(values: Any) -> np.ndarray[Any, Any]:
    return np.array(values.astype(mx.float32) if isinstance(values, mx.array) else values, np.float32)
