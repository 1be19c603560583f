"""The whole process, with a runner that computes nothing: signals and exit statuses."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx
import pytest

from emlxd.daemon import load_with_progress
from tests.daemon import free_port
from tests.residents import House, model

SCRIPT = """
import sys, threading
from pathlib import Path

from emlxd import daemon, footprint
from emlxd.config_file import load
from emlxd.core import ModelInfo, SamplingParams
from emlxd.memory import Needs
from emlxd.worker.load import Model
from emlxd.worker.worker import Worker, WorkerOptions
from tests.worker.fakes import FakeRunner
from tests.worker.fakes import LETTERS, letters_tokenizer

class Runner(FakeRunner):
    def prefill(self, rows):
        if "stuck" in sys.argv:
            threading.Event().wait()
        return super().prefill(rows)

def load_model(settings):
    info = ModelInfo("fake", settings.max_context or 64, settings.slots, len(LETTERS), SamplingParams())
    runner = Runner(settings.slots, lambda tokens: len(tokens) % 26)
    return Model(info, runner, letters_tokenizer(), None)

footprint.predict = lambda settings, path: Needs(weights=1)
daemon.fetch_model = lambda model: (model, Path("."))
daemon.make_worker = lambda settings, path, gate: Worker(
    WorkerOptions.of(settings), lambda: load_model(settings), gate
)
path = Path(sys.argv[1])
daemon.run(load(path), path)
"""


async def test_what_is_loaded_at_the_start_is_shown_by_its_bytes() -> None:
    house = House()
    house.gate.clear()
    registry = house.registry(model("a"), model("b", load="on_demand"))
    active = iter([50, *range(50, 1000, 10)])
    reports: list[tuple[str, int, int | None]] = []
    shown = asyncio.Event()

    def report(what: str, done: int, total: int | None) -> None:
        reports.append((what, done, total))
        if len(reports) == 3:
            shown.set()

    loading = asyncio.create_task(
        load_with_progress(registry, lambda: {"active": next(active)}, lambda: nullcontext(report))
    )
    await shown.wait()
    house.gate.set()
    await loading
    assert reports[:3] == [("loading a", 0, 100), ("loading a", 10, 100), ("loading a", 20, 100)]
    assert house.starts == ["a"]


class Process:
    def __init__(self, folder: Path, *arguments: str, server: str = "") -> None:
        self.port = free_port()
        self.path = folder / "config.yaml"
        self._server = f"server: {{port: {self.port}, drain_timeout: 0{server}}}\n"
        self.write("m")
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(self.path), *arguments],
                stdout=log,
                stderr=log,
                env=os.environ | {"EMLXD_BLAS": "off"},
            )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, verify=False)

    def write(self, *names: str) -> None:
        part = self.path.with_suffix(".part")
        listed = ", ".join(f"{{name: {name}, source: {{path: x.gguf}}}}" for name in names)
        part.write_text(f"{self._server}models: [{listed}]\n")
        os.replace(part, self.path)

    def until(self, what: Callable[[], bool]) -> None:
        """Waits until it is so. What never is fails by the test's own limit."""
        while not what():
            assert self.popen.poll() is None, self.log.read_text()
            time.sleep(0.02)

    def ready(self) -> bool:
        try:
            return self.http.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def served(self) -> list[str]:
        return [model["id"] for model in self.http.get("/v1/models").json()["data"]]


@contextmanager
def running(folder: Path, *arguments: str, server: str = "") -> Iterator[Process]:
    process = Process(folder, *arguments, server=server)
    try:
        process.until(process.ready)
        yield process
    finally:
        process.http.close()
        process.popen.kill()
        process.popen.wait()


def test_a_stuck_worker_ends_the_process_to_be_started_again(tmp_path: Path) -> None:
    with running(tmp_path, "stuck", server=", stall_timeout: 200ms") as process:
        answer = process.http.post("/v1/completions", json={"model": "m", "prompt": "abc"})
        assert answer.status_code == 503
        assert process.popen.wait() == 70
    last = process.log.read_text().splitlines()[-1]
    assert "giving up" in last and "The worker of m" in last


@pytest.mark.parametrize("trigger", ["the file itself", "SIGHUP"])
def test_the_file_is_followed(tmp_path: Path, trigger: str) -> None:
    with running(tmp_path) as process:
        assert process.log.read_text().startswith(f"emlxd follows {process.path}\n")
        process.write("m", "n")
        if trigger == "SIGHUP":
            process.popen.send_signal(signal.SIGHUP)
        process.until(lambda: process.served() == ["m", "n"])
        answer = process.http.post("/v1/completions", json={"model": "n", "prompt": "abc", "max_tokens": 3})
        assert answer.json()["choices"][0]["text"] == "def"
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait() == 0


def test_a_broken_file_is_told_in_the_log_and_changes_nothing(tmp_path: Path) -> None:
    with running(tmp_path) as process:
        process.path.write_text("models: [{name: m, sorce: {}}]")
        process.until(lambda: "the old configuration stays" in process.log.read_text())
        assert process.served() == ["m"]
        assert "emlxd_config_last_reload_successful 0" in process.http.get("/metrics").text
