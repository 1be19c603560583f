from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from emlxd.cli import app


@pytest.fixture
def emlxd(tmp_path, monkeypatch):
    """Runs a command in an empty folder, at home and with a cache there too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EMLXD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EMLXD_CONFIG", raising=False)

    def run(*arguments: str, stdin: str = "") -> Result:
        return CliRunner().invoke(app, list(arguments), input=stdin)

    return run


@pytest.fixture
def config(tmp_path):
    """Writes config.yaml. The default one has a model that is here and one that is missing."""

    def write(text: str | None = None, place: str = "config.yaml", port: int = 1) -> Path:
        (tmp_path / "small.gguf").touch()
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            text
            or f"server: {{port: {port}}}\n"
            "models:\n"
            "  - {name: small, aliases: [s], source: {path: small.gguf}}\n"
            "  - {name: absent, source: {path: absent.gguf}}\n"
        )
        return path

    return write


VECTORS = {"id": "vectors", "kind": "embedding"}


class Daemon(ThreadingHTTPServer):
    """Says what it is told to, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.names = ["small", "s", "absent"]
        self.states: dict[str, str] | None = {"small": "loaded", "absent": "failed"}
        self.pieces: list[str | dict[str, object]] = ["Hello", " there"]
        self.end = b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n'
        self.refusal: tuple[int, str] | None = None
        self.asked: list[dict[str, object]] = []
        self.answers: dict[str, object] = {}
        self.paths: list[str] = []
        self.keys: set[str | None] = set()


class Handler(BaseHTTPRequestHandler):
    server: Daemon

    def do_GET(self) -> None:
        self.note()
        if self.path in self.server.answers:
            self.answer(200, self.server.answers[self.path])
        elif self.path == "/v1/models":
            self.answer(200, {"data": [*({"id": name} for name in self.server.names), VECTORS]})
        elif self.server.states is not None:
            self.answer(200, {"status": "ready", "models": self.server.states})
        else:
            self.answer(503, {"error": {"message": "Not every model answers: small is loading."}})

    def note(self) -> None:
        self.server.paths.append(self.path)
        self.server.keys.add(self.headers["Authorization"])

    def do_POST(self) -> None:
        self.note()
        length = int(self.headers["Content-Length"])
        self.server.asked.append(json.loads(self.rfile.read(length)))
        if self.server.refusal is not None:
            status, message = self.server.refusal
            self.answer(status, {"error": {"message": message}})
            return
        if self.path in self.server.answers:
            self.answer(200, self.server.answers[self.path])
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for piece in self.server.pieces:
            event = piece if isinstance(piece, dict) else {"choices": [{"delta": {"content": piece}}]}
            self.wfile.write(f": heartbeat\n\ndata: {json.dumps(event)}\n\n".encode())
        self.wfile.write(self.server.end)

    def answer(self, status: int, body: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def daemon():
    with Daemon() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()
