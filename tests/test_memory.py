"""What a model takes is known before it is loaded, and whoever must go is chosen with care."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from emlxd import footprint, memory
from emlxd.config import MemorySettings, ModelSettings, PrefixCacheSettings, Settings, Source
from emlxd.core import SamplingParams
from emlxd.errors import ModelFormatError
from emlxd.footprint import predict
from emlxd.graph import device_memory
from emlxd.graph.batch import Begin, PrefillRow
from emlxd.graph.cuda import fused_decoder
from emlxd.graph.device import Device
from emlxd.graph.open import open_runner
from emlxd.memory import Needs, budget_bytes, victims
from emlxd.sources import locate
from emlxd.worker.packing import MAX_TOKENS, SLACK, pack, turns
from tests.daemon import DEFAULT_SOURCE
from tests.graph import tiny
from tests.graph.tiny_families import oracle_of

MiB = 1 << 20


def in_thread(work: Callable[[], Any]) -> Any:
    """Runs ``work`` on a thread of its own, as a model's worker would, and gives what it gave."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def use(path: Path, settings: ModelSettings) -> tuple[int, int, int]:
    """Loads and runs a model at its limits: active bytes, peak, and what is left of it when closed."""

    def work() -> tuple[int, int, int]:
        mx.clear_cache()
        before = device_memory.memory_use().active
        runner = open_runner(path, settings)
        active = device_memory.memory_use().active - before
        mx.reset_peak_memory()
        chunk = settings.prefill_chunk
        begin = Begin(SamplingParams(temperature=0.7), (5,) * chunk)
        row = PrefillRow(0, runner.max_context - chunk, (5,) * chunk, begin)
        runner.prefill([row]).read()
        runner.decode([runner.max_context - 1] * runner.slots).read()
        peak = device_memory.memory_use().peak - before
        runner.close()
        return active, peak, device_memory.memory_use().active - before

    return in_thread(work)  # type: ignore[no-any-return]


def entry(path: Path, prefix: int = 0, **changes: Any) -> ModelSettings:
    return ModelSettings(
        name="m", source=Source(path=path), prefix_cache=PrefixCacheSettings(bytes=prefix), **changes
    )


@pytest.mark.parametrize(
    ("shape", "bits", "weights"),
    [
        ({}, None, "auto"),
        ({"tie_word_embeddings": True}, 4, "keep"),
        ({"num_key_value_heads": 4}, 8, "keep"),
        ({}, 8, "dense"),
    ],
)
@pytest.mark.parametrize("prefix", [0, 4 * MiB])
def test_the_bytes_of_a_folder_are_predicted(
    tmp_path: Path, shape: dict[str, Any], bits: int | None, weights: str, prefix: int
) -> None:
    model, config = tiny.make_llama(**shape)
    config = tiny.quantize(model, config, bits=bits) if bits else config
    tiny.save(tmp_path, model, config)
    settings = entry(tmp_path, prefix, slots=4, prefill_chunk=64, weights=weights)
    del model
    predicted = predict(settings, tmp_path)
    active, peak, left = use(tmp_path, settings)
    assert active == pytest.approx(predicted.total - predicted.activations, rel=0.1)
    assert peak == pytest.approx(predicted.total, rel=0.1)
    assert left < active / 100


@pytest.mark.parametrize("drafts", [True, False])
def test_logits_of_more_than_a_row_for_each_slot_are_predicted(tmp_path: Path, drafts: bool) -> None:
    """Where a step checks drafts, or a prompt is scored."""
    tiny.save(tmp_path, *tiny.make_llama(vocab_size=1 << 16))
    lookup = {"speculative": {"prompt_lookup": {"max_draft": 7}}} if drafts else {}
    settings = entry(tmp_path, slots=4 if drafts else 1, prefill_chunk=64, **lookup)

    def work() -> int:
        mx.clear_cache()
        before = device_memory.memory_use().active
        runner = open_runner(tmp_path, settings)
        prompt = (5,) * 64
        sampling = SamplingParams(temperature=0.7, top_p=0.9)
        mx.reset_peak_memory()
        for slot in range(settings.slots):
            targets = () if drafts else prompt[1:]
            runner.prefill([PrefillRow(slot, 0, prompt, Begin(sampling, prompt), targets)]).read()
        if drafts:
            runner.verify([64] * 4, [[5] * 7] * 4, 7)
        peak = device_memory.memory_use().peak - before
        runner.close()
        return peak

    assert in_thread(work) <= 1.1 * predict(settings, tmp_path).total


@given(st.lists(st.integers(1, 8192), max_size=40), st.integers(1, 8))
def test_what_is_pooled_side_by_side_is_within_the_prediction(texts: list[int], lanes: int) -> None:
    for turn in turns(pack(texts, 8192, lanes=lanes), lanes):
        assert len(turn) <= lanes
        assert sum(step.tokens for step in turn) <= max(MAX_TOKENS * SLACK, turn[0].tokens)


def test_expanded_matrices_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, where a prompt expands those of two layers at a time."""
    model, config = tiny.make_llama()
    tiny.save(tmp_path, model, tiny.quantize(model, config, bits=4))
    found = {}
    for kind in ("metal", "cuda"):
        monkeypatch.setattr(footprint, "current_device", lambda kind=kind: Device(kind))
        settings = entry(tmp_path, prefill_chunk=512, slots=1)
        found[kind] = predict(settings, tmp_path).activations
    head_dim, hidden, inner = 16, 64, 96
    values = (4 + 2 + 2 + 4) * head_dim * hidden + 3 * hidden * inner
    assert found["cuda"] - found["metal"] == 2 * values * 2  # bytes of bfloat16


def test_mlx_keeps_as_much_as_steps_take_and_the_setting_says(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(mx, "set_cache_limit", limits.append)
    footprint.apply_limits(MemorySettings(buffer_cache_bytes=5 * MiB))
    footprint.apply_limits(MemorySettings(buffer_cache_bytes=5 * MiB), 3 * MiB)
    assert limits == [5 * MiB, 8 * MiB]


def weights_with_and_without_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch, bits: int, **shape: Any
) -> tuple[int, int, int]:
    """Bytes as predicted where the decode kernel runs, and with `compile: false`, and those of scales."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "head_dim": 64}
    model, config = tiny.make_llama(**sizes | shape)
    config = tiny.quantize(model, config, bits=bits)
    tiny.save(folder, model, config)
    arrays = dict(tree_flatten(model.parameters()))
    scales = sum(array.size for name, array in arrays.items() if name.endswith((".scales", ".biases")))
    monkeypatch.setattr(footprint, "current_device", lambda: Device("cuda"))
    monkeypatch.setattr(fused_decoder, "on_hopper", lambda: True)
    found = [predict(entry(folder, compile=compile), folder).weights for compile in (True, False)]
    return found[0], found[1], 2 * scales  # bfloat16


def test_the_decode_kernel_s_copy_of_scales_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, plain, scales = weights_with_and_without_kernel(tmp_path, monkeypatch, 4)
    assert fused - plain == scales > 0


@pytest.mark.parametrize(("bits", "shape"), [(8, {}), (4, {"head_dim": 32, "num_attention_heads": 4})])
def test_a_model_that_the_kernel_does_not_take_has_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int, shape: dict[str, Any]
) -> None:
    fused, plain, scales = weights_with_and_without_kernel(tmp_path, monkeypatch, bits, **shape)
    assert fused == plain > scales > 0


@pytest.mark.parametrize("prefix", [0, 4 * MiB])
def test_the_bytes_of_states_are_predicted(tmp_path: Path, prefix: int) -> None:
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 128, "max_position_embeddings": 512}
    tiny.save(tmp_path, *oracle_of("qwen3_next", **sizes))
    settings = entry(tmp_path, prefix, slots=16, prefill_chunk=64)
    predicted = predict(settings, tmp_path)
    active, peak, left = use(tmp_path, settings)
    assert active == pytest.approx(predicted.total - predicted.activations, rel=0.1)
    # An old state lives until its step has run, or becomes the new one if the host is not ahead: how many of
    # them there are at once is a matter of time.
    assert peak <= 1.1 * predicted.total
    assert left < active / 100


def test_layers_that_borrow_keys_and_values_keep_none(tmp_path: Path) -> None:
    tiny.save(tmp_path, *oracle_of("gemma4_text", max_position_embeddings=512))
    settings = entry(tmp_path, slots=16, prefill_chunk=64)
    predicted = predict(settings, tmp_path)
    active, peak, _ = use(tmp_path, settings)
    assert active == pytest.approx(predicted.total - predicted.activations, rel=0.1)
    assert peak <= 1.1 * predicted.total


@pytest.mark.model
def test_the_bytes_of_the_default_model_are_predicted() -> None:
    path = locate(Source(**DEFAULT_SOURCE))
    if path is None:
        pytest.skip("the default model is not in the cache")
    settings = entry(path, slots=2, max_context=1024, prefill_chunk=256, compile=False)
    predicted = predict(settings, path)
    active, peak, left = use(path, settings)
    assert active == pytest.approx(predicted.total - predicted.activations, rel=0.01)
    assert peak == pytest.approx(predicted.total, rel=0.1)
    assert left < active / 100


def test_a_damaged_model_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + b"\xff" * 40)
    with pytest.raises(ModelFormatError, match=r"m\.gguf"):
        predict(entry(tmp_path / "m.gguf"), tmp_path / "m.gguf")


# The budget


@pytest.mark.parametrize(
    ("text", "expected"), [("50%", 500), ("100%", 1000), (0.25, 250), ("2kB", 2000), (300, 300)]
)
def test_a_budget_is_bytes_or_a_share(text: str | float, expected: int) -> None:
    setting = Settings(memory={"budget": text}).memory.budget
    assert budget_bytes(setting, 1000) == expected


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "much", "5 %%", True, 0, float("nan")])
def test_other_budgets_are_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="budget"):
        Settings(memory={"budget": text})


def test_the_device_says_what_it_has() -> None:
    assert device_memory.memory_total() > 100 * MiB


# Victims


@dataclass(frozen=True)
class Loaded:
    number: int
    nbytes: int
    priority: int
    last_used: float


candidates = st.lists(
    st.builds(
        Loaded,
        number=st.integers(),
        nbytes=st.integers(1, 100),
        priority=st.integers(-2, 2),
        last_used=st.floats(0, 100),
    ),
    max_size=8,
    unique_by=lambda model: model.number,
)


@given(candidates, st.integers(0, 400))
def test_victims_free_enough_and_no_more(models: list[Loaded], shortage: int) -> None:
    chosen = victims(models, shortage)
    if chosen is None:
        assert sum(model.nbytes for model in models) < shortage
        return
    assert sum(model.nbytes for model in chosen) >= shortage
    assert sum(model.nbytes for model in chosen[:-1]) < shortage or not chosen
    spared = [model for model in models if model not in chosen]
    for model in chosen:
        assert all((model.priority, model.last_used) <= (kept.priority, kept.last_used) for kept in spared)


def test_the_total_is_the_sum() -> None:
    assert Needs(1, 2, 3, 4).total == 10


@pytest.mark.parametrize(
    ("nbytes", "text"), [(3, "3 B"), (2048, "2.0 KiB"), (3 * MiB, "3.0 MiB"), (1536 * MiB, "1.5 GiB")]
)
def test_bytes_as_people_read_them(nbytes: int, text: str) -> None:
    assert memory.format_bytes(nbytes) == text
