"""The memory of a model's caches is made beside what other models compute."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import mlx.core as mx
import pytest

from emlxd.config import ModelSettings, PrefixCacheSettings, Source
from emlxd.graph import runner as runner_module
from emlxd.graph.open import open_runner
from tests.graph import tiny


class Turns:
    """How many bytes MLX came to hold in each turn."""

    def __init__(self) -> None:
        self.grown: list[int] = []

    def __enter__(self) -> None:
        self._before = mx.get_active_memory()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.grown.append(mx.get_active_memory() - self._before)


def test_caches_are_made_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "PORTION", 1 << 18)
    folder = tiny.save(tmp_path, *tiny.make_llama())
    settings = ModelSettings(
        name="tiny", source=Source(path=folder), slots=4, prefix_cache=PrefixCacheSettings(bytes=1 << 20)
    )
    turns = Turns()
    runner = open_runner(folder, settings, turn=turns)
    caches = runner.cache_bytes + runner.prefix_cache_bytes
    assert caches > 1 << 20
    made = [grown for grown in turns.grown if grown > 1 << 16]
    assert max(made) <= 1 << 18
    assert sum(turns.grown) > caches
