"""Layers with a window keep rings, and compute what they would with the whole context before them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from emlxd.config import ModelSettings, PrefixCacheSettings, PromptLookupSettings, SpeculativeSettings
from emlxd.footprint import predict
from emlxd.graph.attention import Place
from emlxd.graph.batch import Begin, PrefillRow
from emlxd.graph.checkpoint import open_checkpoint
from emlxd.graph.device import current_device
from emlxd.graph.kv_cache import empty_layers
from emlxd.graph.loader import load_transformer
from emlxd.graph.open import open_runner
from emlxd.graph.runner import MlxRunner
from tests.agreement import GREEDY, assert_greedy, assert_same, oracle_greedy
from tests.graph import tiny
from tests.graph.test_parity import generate, settings
from tests.graph.tiny_families import config_of

WINDOW = 16
RING = 128
"""For chunks of 16: the window or a block, and a chunk, in whole blocks."""

SLIDING = ("afmoe", "cohere2", "exaone4", "gemma3_text", "gemma4_text", "gpt_oss", "mistral", "olmo3")
"""Families whose windows mlx-lm has too."""
OTHERS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": 24, "rope_scaling": None},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "starcoder2": {"sliding_window": WINDOW},
}
PROMPTS = [
    [(7 * i * i + 3 * i + seed) % 160 for i in range(length)] for seed, length in enumerate((300, 40, 170))
]


def windowed(folder: Path, family: str, **changes: Any) -> tuple[Any, Path]:
    """A tiny model with windows, and its folder."""
    config = config_of(family) | {"max_position_embeddings": 1024} | changes
    module = importlib.import_module(f"mlx_lm.models.{ {'mistral': 'llama'}.get(family, family) }")
    mx.random.seed(1)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tiny.random_parameters(model))
    return model, tiny.save(folder, model, config)


def open_windowed(folder: Path, **changes: Any) -> MlxRunner:
    usual = {"slots": 4, "max_context": 512, "prefill_chunk": 16, "dtype": "float32"}
    return open_runner(folder, settings(folder, **usual | changes))


@pytest.mark.numeric
@pytest.mark.parametrize("family", SLIDING)
def test_a_text_of_many_windows_is_that_of_mlx_lm(tmp_path: Path, family: str) -> None:
    oracle, folder = windowed(tmp_path, family)
    runner = open_windowed(folder)
    assert runner.ring == RING
    answers = generate(runner, dict(enumerate(PROMPTS)), 150, chunk=16)
    for slot, prompt in enumerate(PROMPTS):
        assert_greedy(oracle, prompt, answers[slot])


@pytest.mark.numeric
@pytest.mark.parametrize("family", OTHERS)
def test_a_ring_gives_the_tokens_of_the_whole_context(tmp_path: Path, family: str) -> None:
    _, folder = windowed(tmp_path, family, **OTHERS[family])
    prompts = dict(enumerate(PROMPTS))
    whole = open_windowed(folder, prefill_chunk=512)
    runner = open_windowed(folder)
    assert (runner.ring, whole.ring) == (RING, None)
    answers, expected = (generate(each, prompts, 100, chunk=16) for each in (runner, whole))
    for slot, prompt in prompts.items():
        assert_same(answers[slot], expected[slot], Whole(folder), prompt)


class Whole:
    """Our model as a function of tokens [1, T], in one pass that looks at them all."""

    def __init__(self, folder: Path) -> None:
        self.model = load_transformer(
            open_checkpoint(folder), current_device(), max_context=512, dtype="float32"
        )
        self.layers = self.model.layers

    def __call__(self, tokens: mx.array) -> mx.array:
        place = Place(slice(0, 1), mx.array([0]), tokens.shape[1], tokens.shape[1])
        kept = empty_layers(self.model.spec, 1, tokens.shape[1], self.model.dtype)
        return self.model.logits(self.model.forward(tokens, place, kept))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """With the widest window for its ring: not a position is to spare."""
    return windowed(tmp_path_factory.mktemp("gemma"), "gemma3_text", sliding_window=RING - 15)


@pytest.mark.numeric
@pytest.mark.parametrize("compile", [True, False])
def test_a_moved_sequence_takes_its_rings_along(gemma: tuple[Any, Path], compile: bool) -> None:
    oracle, folder = gemma
    runner = open_windowed(folder, compile=compile)
    out = generate(runner, {0: PROMPTS[1], 1: PROMPTS[1], 2: PROMPTS[0]}, 20, chunk=16)[2]
    runner.move(2, 0, 319)
    for step in range(20):
        out += runner.decode([319 + step]).read().tokens
    assert_greedy(oracle, PROMPTS[0], out)


@pytest.mark.numeric
def test_a_prompt_survives_steps_of_others_and_padding(gemma: tuple[Any, Path]) -> None:
    """Whatever is written for rows without a token, at whatever place, is not in the way of a ring."""
    oracle, folder = gemma
    runner = open_windowed(folder)
    generate(runner, {0: PROMPTS[1], 2: PROMPTS[1]}, 1, chunk=16)
    prompt = PROMPTS[0]
    for start in range(0, 288, 9):
        rows = [PrefillRow(1, start, tuple(prompt[start : start + 9]))]
        if start < 160:
            rows.append(PrefillRow(3, start // 9 * 16, tuple(PROMPTS[2][:16])))
        runner.prefill(rows)
        runner.decode([40 + start // 9, None, 40 + start // 9])
    assert_greedy(oracle, prompt, generate_from(runner, prompt, 288))


def generate_from(runner: MlxRunner, prompt: list[int], start: int) -> list[int]:
    """8 greedy tokens for a prompt in slot 1, prefilled up to ``start``."""
    last = PrefillRow(1, start, tuple(prompt[start:]), Begin(GREEDY, tuple(prompt)))
    out = list(runner.prefill([last]).read().tokens)
    for step in range(7):
        out.append(runner.decode([None, len(prompt) + step]).read().tokens[1])
    return out


@pytest.mark.numeric
def test_refused_drafts_leave_the_window_whole(gemma: tuple[Any, Path]) -> None:
    oracle, folder = gemma
    lookup = SpeculativeSettings(prompt_lookup=PromptLookupSettings(max_draft=15))
    runner = open_windowed(folder, speculative=lookup)
    prompt = PROMPTS[0][:130]
    expected = oracle_greedy(oracle, prompt, 120)  # which is what is drafted, where it is to be right
    out = generate(runner, {0: prompt}, 1, chunk=16)[0]
    while len(out) < 110:
        right = expected[len(out) : len(out) + len(out) % 5]
        draft = [*right, *[159 - token for token in expected[len(out) + len(right) :]]][:15]
        out += runner.verify([len(prompt) + len(out) - 1], [draft], 15)[0]
    assert_greedy(oracle, prompt, out)


def test_a_step_that_would_overwrite_the_window_is_refused(gemma: tuple[Any, Path]) -> None:
    runner = open_windowed(gemma[1])
    with pytest.raises(ValueError, match="300 tokens in one step, but there is room for 16"):
        runner.prefill([PrefillRow(0, 0, tuple(PROMPTS[0]))])


def test_the_memory_of_rings_is_predicted(gemma: tuple[Any, Path]) -> None:
    def cache_of(chunk: int) -> tuple[int, int]:
        asked = ModelSettings.model_validate(
            settings(gemma[1]).model_dump()
            | {"max_context": 512, "prefill_chunk": chunk, "prefix_cache": PrefixCacheSettings(bytes=0)}
        )
        return predict(asked, gemma[1]).cache, open_runner(gemma[1], asked).cache_bytes

    (predicted, taken), (whole, _) = cache_of(16), cache_of(512)
    assert predicted == taken
    assert taken / whole == pytest.approx((512 + 2 * (RING + 1)) / (3 * 512))
