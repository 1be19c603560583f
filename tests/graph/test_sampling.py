"""Sampling draws from the distributions that its parameters describe, whoever else is in the batch."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from emlxd.core import SamplingParams
from emlxd.graph.batch import Begin
from emlxd.graph.sampling import SamplingMode, fold_seed, logprobs, sample
from emlxd.graph.slots import SlotSampling

pytestmark = pytest.mark.numeric

VOCAB = 40
END = 39
DRAWS = 4000
PROMPT = (1, 2, 3, 3)
ANSWER = (5, 5, 6)
LOGITS = np.random.default_rng(3).normal(0, 2, VOCAB).astype(np.float32)

CASES = {
    "temperature": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.4),
    "hot": SamplingParams(temperature=2.0),
    "top_p": SamplingParams(top_p=0.7),
    "top_k": SamplingParams(top_k=5),
    "min_p": SamplingParams(min_p=0.1),
    "top_k then top_p": SamplingParams(temperature=1.3, top_k=12, top_p=0.8),
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=-1.2),
    "repetition": SamplingParams(repetition_penalty=1.7),
    "bias": SamplingParams(logit_bias=((0, 4.0), (7, -100.0))),
    "no end yet": SamplingParams(min_tokens=9),
    "all together": SamplingParams(
        temperature=1.4,
        top_p=0.9,
        top_k=20,
        min_p=0.02,
        presence_penalty=0.4,
        frequency_penalty=0.6,
        repetition_penalty=1.2,
        logit_bias=((9, 2.0),),
        min_tokens=5,
    ),
}


def reference(params: SamplingParams) -> np.ndarray:
    """The distribution of the next token, step by step as the documentation tells it."""
    logits = LOGITS.astype(np.float64)
    for token, bias in params.logit_bias:
        logits[token] += bias
    if len(ANSWER) < params.min_tokens:
        logits[END] = -np.inf
    counts = np.bincount(ANSWER, minlength=VOCAB)
    for token in set(PROMPT) | set(ANSWER):
        value, penalty = logits[token], params.repetition_penalty
        logits[token] = value / penalty if value > 0 else value * penalty
    logits -= counts * params.frequency_penalty + (counts > 0) * params.presence_penalty
    p = np.exp(logits / params.temperature - np.max(logits / params.temperature))
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    order = np.argsort(-p)
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p]] = 0
    return p / p.sum()


def draw(params: SamplingParams, count: int, *, strangers: bool = False) -> list[int]:
    """``count`` tokens at one place, each with a seed of its own, all rows of one batch."""
    slots = SlotSampling(count, VOCAB, [END])
    for slot in range(count):
        mine = SamplingParams(**{name: getattr(params, name) for name in params.__slots__} | {"seed": slot})
        slots.begin(slot, Begin(mine, PROMPT, ANSWER))
    mode = slots.mode(slice(0, count))
    if strangers:
        mode = SamplingMode(
            random=True, min_p=True, top_k_or_p=True, penalties=True, bias=True, logprobs=True
        )
    logits = mx.broadcast_to(mx.array(LOGITS), (count, VOCAB))
    positions = mx.full((count,), len(PROMPT) + len(ANSWER) - 1, dtype=mx.int32)
    return sample(logits, positions, slots.arrays(mode), mode).tolist()  # type: ignore[return-value]


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_reference(name: str) -> None:
    expected = reference(CASES[name]) * DRAWS
    found = np.bincount(draw(CASES[name], DRAWS), minlength=VOCAB)
    assert found[expected == 0].sum() == 0
    likely = expected >= 5
    chi_square = ((found - expected)[likely] ** 2 / expected[likely]).sum()
    freedom = max(int(likely.sum()) - 1, 1)
    # Wilson-Hilferty: beyond four standard deviations the draws are not from this distribution.
    z = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 4


@pytest.mark.parametrize("name", CASES)
def test_a_stage_that_only_strangers_need_changes_nothing(name: str) -> None:
    assert draw(CASES[name], 200, strangers=True) == draw(CASES[name], 200)


def test_a_row_draws_the_same_in_any_batch() -> None:
    assert draw(CASES["all together"], 50)[:3] == draw(CASES["all together"], 3)


def test_greedy_rows_stay_greedy_beside_random_ones() -> None:
    slots = SlotSampling(2, VOCAB, [END])
    slots.begin(1, Begin(SamplingParams(seed=1), PROMPT))
    mode = slots.mode(slice(0, 2))
    logits = mx.broadcast_to(mx.array(LOGITS), (2, VOCAB))
    tokens = sample(logits, mx.array([3, 3], dtype=mx.int32), slots.arrays(mode), mode)
    assert tokens[0].item() == int(np.argmax(LOGITS))


def test_seeds_of_64_bits_differ_in_every_bit() -> None:
    seeds = [0, 1, -1, 2**32, 2**63 - 1, -(2**63), 7 << 40]
    assert len({fold_seed(seed) for seed in seeds}) == len(seeds)


def test_a_mask_leaves_only_what_it_allows() -> None:
    mode = SamplingMode(masked=True)
    allowed = mx.array([[1 << 7 | 1 << 9, 1 << 2]], dtype=mx.uint32)
    token = sample(mx.array(LOGITS)[None], mx.array([0], dtype=mx.int32), {"allowed": allowed}, mode)
    assert token.item() == max((7, 9, 34), key=lambda t: LOGITS[t])


def test_log_probabilities_are_those_of_the_softmax() -> None:
    expected = LOGITS - np.log(np.exp(LOGITS).sum())
    (row,) = logprobs(mx.array(LOGITS)[None], mx.array([4])).rows([4], [3])
    assert row and row.logprob == pytest.approx(expected[4], abs=1e-5)
    best = np.argsort(-LOGITS)[:3]
    assert [token for token, _ in row.top] == best.tolist()
    assert [value for _, value in row.top] == pytest.approx(expected[best].tolist(), abs=1e-5)


def test_moving_a_slot_takes_its_counts_along() -> None:
    slots = SlotSampling(3, VOCAB, [END])
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, logit_bias=((8, 50.0),), min_tokens=2)
    slots.begin(2, Begin(params, PROMPT, ANSWER))
    slots.move(2, 0)
    arrays = slots.arrays(slots.mode(slice(0, 1)))
    assert arrays["counts"][0, 5].item() == 2
    assert arrays["bias"][0, 8].item() == 50
    assert arrays["until"][0].item() == len(PROMPT) + 1
    assert slots.mode(slice(1, 3)) == SamplingMode()


def test_an_end_that_may_never_come() -> None:
    sampling = SlotSampling(1, 8, [3])
    sampling.begin(0, Begin(SamplingParams(temperature=0.0, min_tokens=2**40), (1, 2)))
    mode = sampling.mode([0])
    logits = mx.array([[0.0, 0, 0, 9, 5, 0, 0, 0]])
    assert sample(logits, mx.array([10_000]), sampling.arrays(mode), mode).tolist() == [4]
