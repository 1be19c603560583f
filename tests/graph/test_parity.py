"""The decoder computes what mlx-lm computes, however the work is cut up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from emlxd.config import ModelSettings, Source
from emlxd.graph.attention import Place
from emlxd.graph.batch import Begin, PrefillRow
from emlxd.graph.checkpoint import open_checkpoint
from emlxd.graph.device import current_device
from emlxd.graph.kv_cache import KVCache
from emlxd.graph.loader import load_transformer
from emlxd.graph.open import open_runner
from emlxd.graph.runner import MlxRunner
from tests.agreement import GREEDY, assert_greedy, close, oracle_logits
from tests.graph import tiny

pytestmark = pytest.mark.numeric

PROMPT = [(7 * i * i + 3 * i) % 320 for i in range(90)]

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied head": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one key head": {"num_key_value_heads": 1},
    "all key heads": {"num_key_value_heads": 4},
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3 rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


def settings(folder: Path, **changes: Any) -> ModelSettings:
    return ModelSettings(name="tiny", source=Source(path=folder), **changes)


def generate(
    runner: MlxRunner, prompts: dict[int, list[int]], count: int, chunk: int = 512
) -> dict[int, list[int]]:
    """Prefills each prompt into its slot, one after the other, then decodes all of them together."""
    out: dict[int, list[int]] = {}
    for slot, prompt in prompts.items():
        for start in range(0, len(prompt), chunk):
            piece = tuple(prompt[start : start + chunk])
            last = start + chunk >= len(prompt)
            pending = runner.prefill(
                [PrefillRow(slot, start, piece, Begin(GREEDY, tuple(prompt)) if last else None)]
            )
        out[slot] = list(pending.read().tokens)
    for step in range(count - 1):
        positions = [len(prompts[s]) + step if s in prompts else None for s in range(max(prompts) + 1)]
        tokens = runner.decode(positions).read().tokens
        for slot in prompts:
            out[slot].append(tokens[slot])
    return out


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_oracle(tmp_path: Path, variant: str) -> None:
    oracle, config = tiny.make_llama(**VARIANTS[variant])
    checkpoint = open_checkpoint(tiny.save(tmp_path, oracle, config, shards=2))
    model = load_transformer(checkpoint, current_device(), max_context=128, dtype="float32")
    cache = KVCache(model.spec, 3, 128, model.dtype)
    expected = oracle_logits(oracle, PROMPT)
    for start in range(0, len(PROMPT), 40):
        piece = PROMPT[start : start + 40]
        place = Place(slice(1, 2), mx.array([start]), len(piece), 128)
        hidden = model.forward(mx.array([piece]), place, cache.layers)
        assert close(model.logits(hidden)[0], expected[start : start + 40])


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("quantized", [False, True])
def test_greedy_tokens_equal_the_oracle(tmp_path: Path, compile: bool, quantized: bool) -> None:
    oracle, config = tiny.make_llama()
    if quantized:
        config = tiny.quantize(oracle, config)
    folder = tiny.save(tmp_path, oracle, config)
    prompts = {0: PROMPT[:50], 1: PROMPT[5:20], 2: PROMPT[30:90]}
    for weights in ("keep", "dense"):
        runner = open_runner(
            folder, settings(folder, slots=4, compile=compile, dtype="float32", weights=weights)
        )
        answers = generate(runner, prompts, 32, chunk=16)
        for slot, prompt in prompts.items():
            assert_greedy(oracle, prompt, answers[slot])


def test_ragged_prompts_prefill_side_by_side(tmp_path: Path) -> None:
    oracle, config = tiny.make_llama()
    folder = tiny.save(tmp_path, oracle, config)
    runner = open_runner(folder, settings(folder, slots=4, dtype="float32"))
    prompts = [PROMPT[:30], PROMPT[10:27], PROMPT[40:61]]
    rows = [
        PrefillRow(slot, 0, tuple(prompts[slot]), Begin(GREEDY, tuple(prompts[slot]))) for slot in (2, 0, 1)
    ]
    first = runner.prefill(rows).read().tokens
    second = runner.decode([len(prompt) for prompt in prompts]).read().tokens
    for prompt, *answer in zip(prompts, (first[1], first[2], first[0]), second, strict=True):
        assert_greedy(oracle, prompt, answer)


def test_a_moved_sequence_goes_on_as_before(tmp_path: Path) -> None:
    oracle, config = tiny.make_llama()
    folder = tiny.save(tmp_path, oracle, config)
    runner = open_runner(folder, settings(folder, slots=4, dtype="float32"))
    out = generate(runner, {0: PROMPT[:20], 1: PROMPT[20:30], 2: PROMPT[40:80]}, 5)[2]
    runner.move(2, 0, 44)
    for step in range(5):
        out += runner.decode([44 + step]).read().tokens
    assert_greedy(oracle, PROMPT[40:80], out)


def test_a_slot_in_the_middle_of_its_prompt_survives_decode_steps_of_others(tmp_path: Path) -> None:
    oracle, config = tiny.make_llama()
    folder = tiny.save(tmp_path, oracle, config)
    runner = open_runner(folder, settings(folder, slots=4, dtype="float32"))
    generate(runner, {0: PROMPT[:9], 2: PROMPT[:7]}, 1)
    runner.prefill([PrefillRow(1, 0, tuple(PROMPT[:25]))])
    runner.decode([9, None, 7])
    runner.decode([10])
    last = PrefillRow(1, 25, tuple(PROMPT[25:40]), Begin(GREEDY, tuple(PROMPT[:40])))
    first = runner.prefill([last]).read().tokens
    assert_greedy(oracle, PROMPT[:40], first)


def test_the_last_position_of_the_context_is_used(tmp_path: Path) -> None:
    oracle, config = tiny.make_llama()
    folder = tiny.save(tmp_path, oracle, config)
    runner = open_runner(folder, settings(folder, slots=2, max_context=64, dtype="float32"))
    prompt = PROMPT[:60]
    runner.decode([0])
    assert_greedy(oracle, prompt, generate(runner, {1: prompt}, 5)[1])


def test_padding_past_the_end_of_the_context_touches_nobody(tmp_path: Path) -> None:
    """A row near its end, beside a longer one: MLX does not check indices."""
    oracle, config = tiny.make_llama()
    folder = tiny.save(tmp_path, oracle, config)
    runner = open_runner(folder, settings(folder, slots=3, max_context=64, dtype="float32"))
    others = {0: PROMPT[:40], 2: PROMPT[20:45]}
    first = generate(runner, others, 1)
    runner.prefill([PrefillRow(1, 0, tuple(PROMPT[:58]))])
    late, long = PROMPT[58:60], PROMPT[45:85]
    rows = [PrefillRow(1, 58, tuple(late), Begin(GREEDY, tuple(PROMPT[:60])))]
    rows.append(PrefillRow(2, 0, tuple(long), Begin(GREEDY, tuple(long))))
    answers = {slot: [token] for slot, token in zip((1, 2), runner.prefill(rows).read().tokens, strict=True)}
    answers[0] = first[0]
    for step in range(4):
        tokens = runner.decode([40 + step, 60 + step, 40 + step]).read().tokens
        for slot, token in enumerate(tokens):
            answers[slot].append(token)
    for slot, prompt in enumerate((PROMPT[:40], PROMPT[:60], long)):
        assert_greedy(oracle, prompt, answers[slot])


def test_steps_are_traced_once_a_shape(tmp_path: Path) -> None:
    oracle, config = tiny.make_llama()
    folder = tiny.save(tmp_path, oracle, config)
    runner = open_runner(folder, settings(folder, slots=4, dtype="float32"))
    generate(runner, {0: PROMPT[:20], 1: PROMPT[:30]}, 20)
    assert runner.traces == 1
    generate(runner, {0: PROMPT[:20]}, 20)
    assert runner.traces == 2
    generate(runner, {0: PROMPT[:25], 1: PROMPT[:33]}, 20)
    assert runner.traces == 2
