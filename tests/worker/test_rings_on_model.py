"""The engine on a tiny model whose windowed layers keep rings: what they have lost is never asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emlxd.config import ModelSettings, PrefixCacheSettings, Source
from emlxd.core import GenerateRequest, SamplingParams
from emlxd.graph.open import open_runner
from emlxd.graph.runner import MlxRunner
from emlxd.worker.disk_cache import DiskCache
from tests.agreement import GREEDY, assert_same
from tests.graph import tiny
from tests.graph.tiny_families import oracle_of
from tests.worker.harness import Drive, Listener

pytestmark = pytest.mark.numeric

RING = 128
PROMPT = [(7 * i * i + 3 * i) % 320 for i in range(300)]


@pytest.fixture(scope="module")
def model() -> tuple[Any, dict[str, Any]]:
    return oracle_of("gpt_oss", vocab_size=320, max_position_embeddings=1024, sliding_window=RING - 15)


@pytest.fixture(scope="module")
def oracle(model: tuple[Any, dict[str, Any]]) -> Any:
    return model[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: tuple[Any, dict[str, Any]]) -> Path:
    return tiny.save(tmp_path_factory.mktemp("rings"), *model)


def open_tiny(folder: Path, prefix_bytes: int = 1 << 21) -> MlxRunner:
    settings = ModelSettings(
        name="tiny",
        source=Source(path=folder),
        slots=2,
        max_context=1024,
        prefill_chunk=16,
        dtype="float32",
        prefix_cache=PrefixCacheSettings(bytes=prefix_bytes),
    )
    return open_runner(folder, settings)


@pytest.fixture(scope="module")
def runner(folder: Path) -> MlxRunner:
    runner = open_tiny(folder)
    assert runner.ring == RING
    return runner


@pytest.fixture
def drive(runner: MlxRunner) -> Drive:
    runner.reset()
    return Drive(runner, slots=2, chunk=16)


def submit(drive: Drive, prompt: list[int], count: int = 24, **changes: object) -> Listener:
    changes = {"sampling": GREEDY} | changes
    id = f"{len(prompt)} {count} {changes} {drive.now}"
    return drive.submit(GenerateRequest(id, tuple(prompt), count, **changes))  # type: ignore[arg-type]


def alone(runner: MlxRunner, prompt: list[int], count: int = 24, **changes: object) -> list[int]:
    """The answer of an engine that has seen nothing else."""
    runner.reset()
    drive = Drive(runner, slots=2, chunk=16)
    listener = submit(drive, prompt, count, **changes)
    drive.run()
    return listener.tokens


def cached(listener: Listener) -> int:
    return listener.end.usage.cached_tokens  # type: ignore[union-attr]


@pytest.mark.parametrize("shared", [300, 200, 130, 70])
def test_a_prompt_goes_on_from_any_block(drive: Drive, runner: MlxRunner, oracle: Any, shared: int) -> None:
    submit(drive, PROMPT)
    drive.run()
    prompt = [*PROMPT[:shared], *range(5)]
    listener = submit(drive, prompt)
    drive.run()
    assert cached(listener) == shared // 64 * 64
    assert_same(listener.tokens, alone(runner, prompt), oracle, prompt)


def test_an_answer_longer_than_a_ring_is_a_prefix(drive: Drive, runner: MlxRunner, oracle: Any) -> None:
    first = submit(drive, PROMPT[:50], 400)
    drive.run()
    turn = [*PROMPT[:50], *first.tokens, 7, 8, 9]
    second = submit(drive, turn)
    drive.run()
    assert cached(second) == 448
    assert_same(second.tokens, alone(runner, turn), oracle, turn)


def test_an_answer_that_begins_late_does_not_copy_what_is_gone(
    drive: Drive, runner: MlxRunner, oracle: Any
) -> None:
    """The second answer waits for a slot, while the first one goes on past the prompt that they share."""
    params = SamplingParams(temperature=0.9, seed=5)
    submit(drive, PROMPT[100:110], 100)
    many = submit(drive, PROMPT[:150], 250, n=2, sampling=params)
    drive.run()
    for index in range(2):
        own = SamplingParams(temperature=0.9, seed=5 + index)
        expected = alone(runner, PROMPT[:150], 250, sampling=own)
        assert_same(many.tokens_of(index), expected, oracle, PROMPT[:150], own)


def test_answers_that_begin_together_share_their_prompt(drive: Drive, runner: MlxRunner, oracle: Any) -> None:
    many = submit(drive, PROMPT[:150], 30, n=2, sampling=SamplingParams(temperature=0.9, seed=5))
    computed = runner.prefill
    tokens = []
    runner.prefill = lambda rows: tokens.extend(rows) or computed(rows)  # type: ignore[method-assign,func-returns-value]
    drive.run()
    runner.prefill = computed  # type: ignore[method-assign]
    assert sum(len(row.tokens) for row in tokens) == 151
    own = SamplingParams(temperature=0.9, seed=6)
    assert_same(many.tokens_of(1), alone(runner, PROMPT[:150], 30, sampling=own), oracle, PROMPT[:150], own)


def test_a_cache_too_small_for_a_prompt_keeps_its_beginning(folder: Path, oracle: Any) -> None:
    room = open_tiny(folder, 0).block_bytes * 3
    runner = open_tiny(folder, room)
    drive = Drive(runner, slots=2, chunk=16)
    for _ in range(2):
        listener = submit(drive, PROMPT)
        drive.run()
    assert cached(listener) == 192
    assert_same(listener.tokens, alone(runner, PROMPT), oracle, PROMPT)


def test_what_was_overwritten_is_not_kept(folder: Path, oracle: Any) -> None:
    """Another prompt takes the place of a running answer's first blocks, which only the cache still had."""
    runner = open_tiny(folder, open_tiny(folder, 0).block_bytes * 3)
    drive = Drive(runner, slots=2, chunk=16)
    running = submit(drive, PROMPT, 100)
    while not running.events:
        drive.step()
    submit(drive, PROMPT[100:], 1)
    drive.run()
    listener = submit(drive, PROMPT)
    drive.run()
    assert cached(listener) == 0
    assert_same(listener.tokens, alone(runner, PROMPT), oracle, PROMPT)


def test_blocks_come_back_from_the_disk_into_rings(folder: Path, oracle: Any, tmp_path: Path) -> None:
    answers = []
    for expected in (0, 256):
        disk = DiskCache(tmp_path, "tiny", "v1", 1 << 22)
        drive = Drive(open_tiny(folder), slots=2, chunk=16, disk=disk)
        listener = submit(drive, PROMPT)
        drive.run()
        disk.close()
        assert cached(listener) == expected
        answers.append(listener.tokens)
    assert_same(*answers, oracle, PROMPT)
