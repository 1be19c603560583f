"""A Hugging Face hub of one repository on a loopback port: what the real client asks of the real hub."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REPO = "org/model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StubHub(ThreadingHTTPServer):
    """Serves ``files`` as ``org/model``. ``cut`` names files whose next transfer breaks half-way."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.cut: set[str] = set()
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator[StubHub]:
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: StubHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.split("?")[0]
        self.server.requests.append(f"{self.command} {path}")
        known = {f"/api/models/{REPO}/revision/{revision}" for revision in ("main", COMMIT)}
        if path in known:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.server.files.items()]
            self._send(json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"/api/models/{REPO}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.server.files.items()
            ]
            self._send(json.dumps(tree).encode())
        elif path.startswith(f"/{REPO}/resolve/"):
            self._send_file(path.split("/", 5)[5])
        elif path.startswith(f"/api/models/{REPO}/"):
            self._send(b"{}", status=404, headers={"X-Error-Code": "RevisionNotFound"})
        else:
            self._send(b"{}", status=404, headers={"X-Error-Code": "RepoNotFound"})

    def _send_file(self, name: str) -> None:
        data = self.server.files.get(name)
        if data is None:
            self._send(b"", status=404, headers={"X-Error-Code": "EntryNotFound"})
            return
        start = 0
        if self.headers.get("Range"):
            start = int(self.headers["Range"].removeprefix("bytes=").split("-")[0])
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        cut = name in self.server.cut and self.command == "GET"
        if cut:
            self.server.cut.remove(name)
        self._send(data[start:], status=206 if start else 200, headers=headers, cut=cut)

    def _send(
        self, body: bytes, *, status: int = 200, headers: dict[str, str] | None = None, cut: bool = False
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        return
