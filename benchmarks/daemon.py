"""A daemon in a process of its own, to be measured from outside."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml


@contextmanager
def running(config: Mapping[str, Any]) -> Iterator[int]:
    """Serves ``config`` on a free port until the block ends, and gives the port once the models are loaded.

    Exits with the daemon's log if it does not start.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "config.yaml", Path(folder) / "log"
        file.write_text(yaml.safe_dump({**config, "server": {"port": port}}))
        command = [sys.executable, "-m", "emlxd", "serve", "--config", str(file)]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            if not _wait_ready(port, process):
                sys.exit(f"the daemon did not start:\n{log.read_text()}")
            yield port
        finally:
            process.terminate()
            process.wait()


def _wait_ready(port: int, process: subprocess.Popen[bytes]) -> bool:
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready"):
                return True
        except urllib.error.URLError:
            time.sleep(0.2)
    return False
