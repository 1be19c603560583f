"""The engine on a tiny model with adapters: what one of them computed is never another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emlxd.core import GenerateRequest, SamplingParams
from emlxd.graph.open import open_runner
from emlxd.graph.runner import MlxRunner
from emlxd.worker.disk_cache import DiskCache
from emlxd.worker.sequence import Adapter
from tests.agreement import GREEDY, assert_same
from tests.graph import tiny, tiny_adapters
from tests.graph.test_adapters import adapted, settings
from tests.worker.harness import Drive, Listener
from tests.worker.test_engine_on_model import PROMPTS

pytestmark = pytest.mark.numeric

ADAPTERS = [Adapter(), Adapter(1, b"one"), Adapter(2, b"two")]
CREATIVE = SamplingParams(temperature=0.9, seed=5)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        tiny_adapters.save_mlx(folder / str(seed), tiny.make_llama()[0], seed=seed, rank=seed + 2)
        for seed in (1, 2)
    ]


@pytest.fixture(scope="module")
def oracles(paths: list[Path]) -> list[Any]:
    """By the number of the adapter."""
    return [adapted(tiny.make_llama()[0], path) for path in (None, *paths)]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, paths: list[Path]) -> MlxRunner:
    base = tiny.save(tmp_path_factory.mktemp("base"), *tiny.make_llama())
    return open_runner(base, settings(base, paths))


@pytest.fixture
def drive(runner: MlxRunner) -> Drive:
    runner.reset()
    return Drive(runner, slots=4)


def submit(drive: Drive, prompt: list[int], adapter: Adapter, **changes: object) -> Listener:
    changes = {"max_tokens": 24, "sampling": GREEDY} | changes
    id = f"{prompt[:2]} {adapter.number} {changes}"
    return drive.submit(GenerateRequest(id, tuple(prompt), **changes), adapter=adapter)  # type: ignore[arg-type]


def test_answers_are_the_same_alone_and_among_other_adapters(drive: Drive, oracles: list[Any]) -> None:
    jobs = [
        (prompt, ADAPTERS[number % 3], (GREEDY, CREATIVE)[number % 2])
        for number, prompt in enumerate(PROMPTS)
    ]
    together = [submit(drive, prompt, adapter, sampling=params) for prompt, adapter, params in jobs]
    drive.run()
    for (prompt, adapter, params), listener in zip(jobs, together, strict=True):
        alone = submit(drive, prompt, adapter, sampling=params)
        drive.run()
        assert_same(alone.tokens, listener.tokens, oracles[adapter.number], prompt, params)


def test_what_an_adapter_computed_is_reused_by_it_alone(drive: Drive, oracles: list[Any]) -> None:
    prompt = PROMPTS[5]
    first = [submit(drive, prompt, adapter) for adapter in ADAPTERS]
    drive.run()
    again = [submit(drive, prompt, adapter) for adapter in ADAPTERS]
    drive.run()
    assert len({listener.text for listener in first}) == 3
    for oracle, one, other in zip(oracles, first, again, strict=True):
        assert_same(one.tokens, other.tokens, oracle, prompt)
    assert [listener.end.usage.cached_tokens for listener in first] == [0, 0, 0]  # type: ignore[union-attr]
    assert [listener.end.usage.cached_tokens for listener in again] == [192] * 3  # type: ignore[union-attr]


def test_several_answers_to_one_prompt_have_its_adapter(drive: Drive, oracles: list[Any]) -> None:
    many = submit(drive, PROMPTS[2], ADAPTERS[2], n=5, sampling=CREATIVE)
    drive.run()
    params = SamplingParams(temperature=0.9, seed=8)
    alone = submit(drive, PROMPTS[2], ADAPTERS[2], sampling=params)
    drive.run()
    assert_same(many.tokens_of(3), alone.tokens, oracles[2], PROMPTS[2], params)


def test_blocks_on_the_disk_are_told_apart_too(runner: MlxRunner, tmp_path: Path) -> None:
    for expected in (0, 192):
        runner.reset()
        disk = DiskCache(tmp_path, "tiny", "v1", 1 << 22)
        drive = Drive(runner, slots=4, disk=disk)
        listeners = [submit(drive, PROMPTS[5], adapter) for adapter in ADAPTERS[1:]]
        drive.run()
        disk.close()
        assert [one.end.usage.cached_tokens for one in listeners] == [expected] * 2  # type: ignore[union-attr]
