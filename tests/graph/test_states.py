"""Recurrent states in the cache: who shares them, and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from emlxd.graph.batch import Begin, PrefillRow
from emlxd.graph.open import open_runner
from emlxd.graph.runner import MlxRunner
from tests.agreement import GREEDY, assert_same
from tests.graph import tiny
from tests.graph.test_parity import settings
from tests.graph.tiny_families import oracle_of

SLOTS = 16
SIZES = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_value_heads": 8}
STATE = 8 * 128 * 128 * 4  # bytes of a slot in a layer


def open_tiny(folder: Path) -> tuple[MlxRunner, Any]:
    """And the same model in mlx-lm."""
    oracle, config = oracle_of("qwen3_next", **SIZES)
    tiny.save(folder, oracle, config)
    return open_runner(folder, settings(folder, slots=SLOTS, max_context=128, dtype="float32")), oracle


def prefill(runner: MlxRunner, slot: int, prompt: list[int]) -> list[int]:
    return list(
        runner.prefill([PrefillRow(slot, 0, tuple(prompt), Begin(GREEDY, tuple(prompt)))]).read().tokens
    )


def test_a_step_costs_the_states_of_its_own_rows(tmp_path: Path) -> None:
    runner, _ = open_tiny(tmp_path)
    prefill(runner, 0, [5, 6, 7])
    runner.decode([3]).read()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    runner.decode([4]).read()
    assert mx.get_peak_memory() - before < 4 * STATE  # a copy of all slots' would be 16 in each layer


@pytest.mark.numeric
def test_steps_of_more_and_of_fewer_rows_keep_each_other_s_states(tmp_path: Path) -> None:
    runner, oracle = open_tiny(tmp_path)
    prompts = {slot: [slot, 5, 9 + slot] for slot in (0, 1, 5)}
    alone = {}
    for slot, prompt in prompts.items():
        alone[slot] = prefill(runner, 0, prompt)
        for position in range(3, 13):
            alone[slot] += runner.decode([position]).read().tokens
    got: dict[int, list[int]] = {}

    def decode(*slots: int) -> None:
        at = [2 + len(got[slot]) if slot in slots else None for slot in range(slots[-1] + 1)]
        tokens = runner.decode(at).read().tokens
        for slot in slots:
            got[slot].append(tokens[slot])

    got[0] = prefill(runner, 0, prompts[0])
    decode(0)
    runner.prefill([PrefillRow(1, 0, tuple(prompts[1][:2]))])
    decode(0)
    got[5] = prefill(runner, 5, prompts[5])
    decode(0, 5)
    decode(0, 5)
    last = PrefillRow(1, 2, tuple(prompts[1][2:]), Begin(GREEDY, tuple(prompts[1])))
    got[1] = list(runner.prefill([last]).read().tokens)
    decode(0, 1, 5)
    decode(0, 1, 5)
    decode(0, 1)
    decode(0)
    decode(0)
    for slot, tokens in got.items():
        assert_same(tokens, alone[slot][: len(tokens)], oracle, prompts[slot])
