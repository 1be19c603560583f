"""Folders of random weights: both programs that are measured on them read the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from emlxd.config import ModelSettings, Source
from emlxd.graph import random_model
from emlxd.graph.open import open_runner
from emlxd.graph.runner import MlxRunner
from tests.agreement import assert_greedy
from tests.graph.test_parity import generate

SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}
EXPERTS: dict[str, Any] = SMALL | {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
PROMPT = [(7 * i * i + 3 * i) % 512 for i in range(40)]


def write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, bits: int | None, **sizes: Any
) -> Path:
    config = dict(random_model.SHAPES[shape]) | sizes
    monkeypatch.setattr(random_model, "SHAPES", {"tiny": config})
    mx.random.seed(0)
    return random_model.write_model(tmp_path / "model", "tiny", bits)


def runner_of(folder: Path, **changes: Any) -> MlxRunner:
    source = Source(path=folder)
    return open_runner(folder, ModelSettings(name="m", source=source, slots=1, max_context=128, **changes))


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("shape", random_model.SHAPES)
def test_both_read_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, bits: int | None
) -> None:
    folder = write(tmp_path, monkeypatch, shape, bits, **(EXPERTS if shape == "qwen3-30b-a3b" else SMALL))
    oracle = load_model(folder)[0]
    oracle.set_dtype(mx.float32)  # as emlxd computes on a CPU
    runner = runner_of(folder, dtype="float32")
    assert_greedy(oracle, PROMPT, generate(runner, {0: PROMPT}, 12)[0])


def test_experts_are_stored_as_mlx_lm_converts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, monkeypatch, "qwen3-30b-a3b", 4, **EXPERTS)
    quantization = json.loads((folder / "config.json").read_text())["quantization"]
    router = {"group_size": 64, "bits": 8}
    assert quantization == {"group_size": 64, "bits": 4} | {
        f"model.layers.{index}.mlp.gate": router for index in range(2)
    }
    layer = mx.load(str(folder / "model-00001.safetensors"))
    assert layer["model.layers.0.mlp.gate.weight"].shape == (8, 128 * 8 // 32)
    assert layer["model.layers.0.mlp.switch_mlp.down_proj.weight"].shape == (8, 128, 64 * 4 // 32)


def test_a_step_reads_neither_the_whole_embedding_nor_idle_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, monkeypatch, "qwen3-30b-a3b", None, **EXPERTS)
    runner = runner_of(folder, dtype="bfloat16")
    embedding, experts = 2 * 512 * 128, 2 * 2 * 8 * 3 * 128 * 64
    assert runner.weight_bytes - embedding - runner.bytes_read(1) == pytest.approx(experts * 6 / 8, abs=4)
    assert runner.weight_bytes - embedding - runner.bytes_read(3) == pytest.approx(
        experts * (6 / 8) ** 3, abs=4
    )


def test_a_step_reads_an_embedding_that_is_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(write(tmp_path, monkeypatch, "llama-1b", None, **SMALL))
    assert runner.bytes_read(1) == runner.weight_bytes
