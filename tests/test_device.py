"""What ``EMLXD_TEST_DEVICE`` does to a run of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from emlxd.graph.device import current_device
from tests import device

ROOT = Path(__file__).parent.parent
no_gpu = pytest.mark.skipif(mx.is_available(mx.gpu), reason="there is a GPU")


def run(*arguments: str, name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=os.environ | {device.VARIABLE: name},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def restored() -> Iterator[None]:
    before = mx.default_device()
    yield
    mx.set_default_device(before)


@pytest.mark.parametrize("environ", [{}, {device.VARIABLE: ""}, {device.VARIABLE: "cpu"}])
def test_the_cpu_unless_told_otherwise(environ: dict[str, str]) -> None:
    assert device.chosen(environ) == "cpu"


def test_this_run_computes_where_it_was_told() -> None:
    assert device.current() == device.chosen()
    assert current_device().gpu == (device.chosen() == "gpu")


def test_the_gpu_is_mlx_s_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    monkeypatch.setattr(mx, "is_available", lambda kind: True)
    monkeypatch.setattr(mx, "set_default_device", used.append)
    device.use({device.VARIABLE: "gpu"})
    device.use({})
    assert used == [mx.gpu, mx.cpu]


def test_threads_compute_on_the_device_of_the_process(restored: None) -> None:
    """Unlike streams, which are a thread's own."""
    with ThreadPoolExecutor(1) as before:
        before.submit(mx.default_device).result()
        mx.set_default_device(mx.Device(mx.cpu, 1))
        assert before.submit(mx.default_device).result() == mx.Device(mx.cpu, 1)
    with ThreadPoolExecutor(1) as after:
        assert after.submit(mx.default_device).result() == mx.Device(mx.cpu, 1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tpu", "EMLXD_TEST_DEVICE is 'tpu', expected cpu or gpu"),
        pytest.param("gpu", "EMLXD_TEST_DEVICE is gpu, but this MLX finds no GPU", marks=no_gpu),
    ],
)
def test_a_device_that_is_not_there_is_told_in_a_line(name: str, said: str) -> None:
    tests = run("pytest", "tests/test_keys.py", name=name)
    assert tests.returncode == pytest.ExitCode.USAGE_ERROR
    assert said in tests.stderr
    daemon = run("tests.device", "serve", name=name)
    assert (daemon.returncode, daemon.stdout) == (1, "")
    assert daemon.stderr.startswith(said)
    assert "Traceback" not in tests.stderr + daemon.stderr


def test_a_run_says_what_it_computes_on() -> None:
    assert "MLX's device: cpu" in run("pytest", "tests/test_keys.py", name="cpu").stdout
