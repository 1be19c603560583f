"""A loaded model: its K/V are told from others of equal tokens, and it has computed before it is used."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from emlxd.core import SamplingParams
from emlxd.errors import ModelFormatError
from emlxd.graph.batch import Begin, PrefillRow
from emlxd.graph.runner import MlxRunner
from emlxd.worker.load import Model, load_model
from tests.graph import tiny, tiny_adapters
from tests.graph.test_adapters import settings
from tests.wordpiece import write_wordpiece


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_wordpiece(tiny.save(folder, *tiny.make_llama()))


def load(base: Path, *adapters: Path, **changes: object) -> Model:
    """On a thread of its own, as a worker does, and frees it there."""

    def load_and_free() -> Model:
        model = load_model(settings(base, adapters, compile=False, **changes), base)
        model.runner.close()
        return model

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(load_and_free).result()


def test_adapters_with_files_of_one_size_and_time_are_told_apart(base: Path, tmp_path: Path) -> None:
    """As those are that come out of one archive, or were trained alike and stored without times."""
    folders = [
        tiny_adapters.save_mlx(tmp_path / str(seed), tiny.make_llama()[0], seed=seed) for seed in (1, 2)
    ]
    for file in (file for folder in folders for file in folder.iterdir()):
        os.utime(file, ns=(0, 0))
    seeds = [adapter.seed for adapter in load(base, *folders).adapters.values()]
    swapped = [adapter.seed for adapter in load(base, *reversed(folders)).adapters.values()]
    assert len({*seeds, *swapped, b""}) == 5
    assert [adapter.seed for adapter in load(base, *folders).adapters.values()] == seeds


def test_another_context_is_another_fingerprint(base: Path) -> None:
    """Some models rotate keys otherwise when they are to read long contexts (longrope)."""
    usual, long = (load(base, max_context=size).fingerprint for size in (128, 256))
    assert usual != long
    assert load(base, max_context=128).fingerprint == usual


def test_models_with_files_of_one_size_and_time_are_told_apart(base: Path, tmp_path: Path) -> None:
    """Fine-tunes have the shapes of their base, and archives and copies set times as they like."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        shutil.copytree(base, folder)
        set_times(folder)
    first = load(here).fingerprint
    assert load(there).fingerprint != first
    assert load(here).fingerprint == first


def test_other_files_in_the_same_place_are_another_model(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    set_times(folder)
    before = load(folder).fingerprint
    (weights,) = folder.glob("*.safetensors")
    content, changed = bytearray(weights.read_bytes()), weights.stat().st_ctime_ns
    content[-1] ^= 1
    while weights.stat().st_ctime_ns == changed:  # a clock may be coarse
        weights.write_bytes(content)
    set_times(folder)
    assert load(folder).fingerprint != before


def test_a_link_to_a_model_is_the_model(base: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(base)
    assert load(tmp_path / "link").fingerprint == load(base).fingerprint


def set_times(folder: Path) -> None:
    for file in folder.iterdir():
        os.utime(file, ns=(0, 0))


def test_a_usual_step_is_traced_before_the_first_request(base: Path) -> None:
    def traces() -> tuple[int, int]:
        model = load_model(settings(base, [], prefill_chunk=32), base)
        before = model.runner.traces
        for sampling in (model.info.sampling, SamplingParams(temperature=0.0)):
            model.runner.prefill([PrefillRow(0, 0, (5, 6), Begin(sampling, (5, 6)))]).read()
            model.runner.decode([2]).read()
        after = model.runner.traces
        model.runner.close()
        return before, after

    with ThreadPoolExecutor(1) as thread:
        before, after = thread.submit(traces).result()
    assert before == after == 2


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"temperature": 0.0, "top_k": 50.0, "top_p": None}, SamplingParams(temperature=0.0, top_k=50)),
        ({"temperature": "0.5", "do_sample": True}, SamplingParams(temperature=0.5)),
        ({"temperature": 0.5, "do_sample": False}, SamplingParams(temperature=0.0)),
        ({"temperature": 0.5, "top_p": "much"}, SamplingParams(temperature=0.5)),
    ],
)
def test_how_a_model_samples_by_its_own_files(
    base: Path, tmp_path: Path, own: dict[str, object], expected: SamplingParams
) -> None:
    shutil.copytree(base, tmp_path / "own")
    (tmp_path / "own" / "generation_config.json").write_text(json.dumps(own))
    with capture_logs() as logs:
        assert load(tmp_path / "own").info.sampling == expected
    assert [entry["top_p"] for entry in logs if "top_p" in entry] == (
        ["Input should be a valid number, unable to parse string as a number"]
        if "much" in own.values()
        else []
    )


def test_what_needs_no_device_fails_before_weights_are_loaded(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    (folder / "chat_template.jinja").write_text("{% if %}")
    monkeypatch.setattr("emlxd.graph.open.open_runner", lambda *_: pytest.fail("loads its weights"))
    with pytest.raises(ModelFormatError, match="template"):
        load_model(settings(folder, []), folder)


def test_a_model_that_fails_at_its_first_step_is_freed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[MlxRunner] = []
    close = MlxRunner.close

    def noted(runner: MlxRunner) -> None:
        closed.append(runner)
        close(runner)

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(MlxRunner, "decode", fail)
    monkeypatch.setattr(MlxRunner, "close", noted)
    with ThreadPoolExecutor(1) as thread, pytest.raises(MemoryError):
        thread.submit(load_model, settings(base, []), base).result()
    assert len(closed) == 1
