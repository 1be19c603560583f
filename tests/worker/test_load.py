"""What tells K/V of a loaded model from other K/V of equal tokens."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

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
