"""What a long answer and many short ones leave behind: nothing."""

from __future__ import annotations

import gc
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest

from emlxd.config import ModelSettings, PrefixCacheSettings, Source
from emlxd.core import GenerateRequest, SamplingParams
from emlxd.graph.open import open_runner
from emlxd.graph.runner import MlxRunner
from tests.graph import tiny
from tests.worker.harness import Drive

SLOTS = 4
PREFIX_BYTES = 1 << 20
CREATIVE = SamplingParams(temperature=0.9, top_p=0.95, frequency_penalty=0.3, seed=5)


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes, how many arrays there are, and how often a step was traced."""

    resident: int
    active: int
    arrays: int
    traces: int

    @staticmethod
    def of(runner: MlxRunner) -> Reading:
        gc.collect()
        mx.clear_cache()
        arrays = sum(type(thing) is mx.array for thing in gc.get_objects())
        return Reading(resident_bytes(), mx.get_active_memory(), arrays, runner.traces)


def resident_bytes() -> int:
    """Of this process now; where only the highest ever can be had, that."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def open_tiny(folder: Path, context: int) -> MlxRunner:
    folder = tiny.save(folder, *tiny.make_llama(max_position_embeddings=context))
    settings = ModelSettings(
        name="tiny",
        source=Source(path=folder),
        slots=SLOTS,
        dtype="float32",
        prefix_cache=PrefixCacheSettings(bytes=PREFIX_BYTES),
    )
    return open_runner(folder, settings)


def assert_no_growth(readings: list[Reading]) -> None:
    """Of resident memory, which an allocator lets go up and down by some megabytes."""
    before, after = (
        choose(reading.resident for reading in some)
        for choose, some in ((max, readings[:3]), (min, readings[-3:]))
    )
    assert after <= before + (32 << 20)


@pytest.mark.parametrize("tokens", [1_500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_one_long_stream(tmp_path: Path, tokens: int) -> None:
    runner = open_tiny(tmp_path, 32768)
    drive = Drive(runner, slots=SLOTS)
    listener = drive.submit(GenerateRequest("long", tuple(range(40)), tokens, CREATIVE, ignore_eos=True))
    readings = []
    for step in range(1, tokens + 10):
        drive.step()
        if drive.engine.idle:
            break
        if step % (tokens // 10) == 0:
            listener.events.clear()
            readings.append(Reading.of(runner))
    assert listener.end is not None
    early, late = readings[1], readings[-1]
    assert late.active <= early.active + (64 << 10)
    assert late.arrays <= early.arrays + 8
    assert_no_growth(readings)
    assert late.traces <= 10  # one for each doubling of the window


@pytest.mark.parametrize("requests", [200, pytest.param(2_000, marks=pytest.mark.slow)])
def test_many_short_requests(tmp_path: Path, requests: int) -> None:
    runner = open_tiny(tmp_path, 1024)
    drive = Drive(runner, slots=SLOTS)
    readings = []
    for number in range(1, requests + 1):
        prompt = tuple((number * 31 + i * (number % 7 + 1)) % 320 for i in range(10 + number % 90))
        params = CREATIVE if number % 2 else SamplingParams(temperature=0.0, logprobs=3)
        drive.submit(GenerateRequest(str(number), prompt, 6, params, ignore_eos=True))
        if number % SLOTS == 0:
            drive.run()
        if number % (requests // 10) == 0:
            drive.run()
            readings.append(Reading.of(runner))
    early, late = readings[1], readings[-1]
    assert late.active <= early.active + (64 << 10)
    assert late.arrays <= early.arrays + 8
    assert_no_growth(readings)
    assert late.traces <= early.traces + 8  # the shapes that had not come together before
