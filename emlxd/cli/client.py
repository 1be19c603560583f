"""A small client of a running daemon, on the standard library."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from http.client import HTTPException, HTTPResponse
from typing import Any

from emlxd.errors import UserError, message_in

Message = dict[str, str]

CONNECT_TIMEOUT = 5.0  # seconds; also for answers that are not streams
STREAM_TIMEOUT = 600.0  # seconds between two lines: a long prompt on a slow machine
RELOAD_TIMEOUT = 3600.0  # seconds: models are downloaded and loaded, and running requests finish first


class Refused(UserError):
    """The daemon answered with an error; the message is its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """``url`` is the server's, with or without /v1. Raises UserError when nothing answers there."""

    def __init__(self, url: str, key: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"'{url}' is no address of a server, expected one such as http://127.0.0.1:8420.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.key = key
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def model_names(self) -> list[str]:
        """Of those that write text. Only emlxd says of a model that it does not."""
        with self._open("/v1/models") as response:
            models = json.load(response)["data"]
        return [model["id"] for model in models if model.get("kind", "chat") == "chat"]

    def states(self) -> tuple[dict[str, str], str]:
        """Each model's state, and what is to be said when not all is well."""
        try:
            with self._open("/ready") as response:
                return json.load(response)["models"], ""
        except UserError as error:
            return {}, error.message

    def status(self) -> dict[str, Any]:
        """What /admin/status says."""
        with self._open("/admin/status") as response:
            status: dict[str, Any] = json.load(response)
            return status

    def requests(self) -> list[dict[str, Any]]:
        """What runs now."""
        with self._open("/admin/requests") as response:
            requests: list[dict[str, Any]] = json.load(response)["requests"]
            return requests

    def healthy(self) -> bool:
        """Whether it is emlxd that answers."""
        try:
            with self._open("/health") as response:
                return bool(json.load(response) == {"status": "ok"})
        except (UserError, ValueError):
            return False

    def reload(self, *, dry_run: bool) -> dict[str, list[str]]:
        """What changed, or would, by kind of change."""
        path = f"/admin/reload?dry_run={'true' if dry_run else 'false'}"
        with self._open(path, {}, RELOAD_TIMEOUT) as response:
            plan: dict[str, list[str]] = json.load(response)["plan"]
            return plan

    def chat(self, model: str, messages: Sequence[Message]) -> Generator[str]:
        """The answer, piece by piece. Closing the iterator stops the generation."""
        body = {"model": model, "messages": list(messages), "stream": True}
        with self._open("/v1/chat/completions", body, STREAM_TIMEOUT) as response:
            try:
                for event in _events(response):
                    if "error" in event:
                        raise Refused(500, event["error"]["message"])
                    for choice in event["choices"]:
                        yield choice["delta"].get("content") or ""
            except (OSError, HTTPException) as error:
                raise UserError(f"The connection to {self.url} broke: {error}.") from None

    def _open(self, path: str, body: Any = None, timeout: float = CONNECT_TIMEOUT) -> HTTPResponse:
        try:
            request = urllib.request.Request(
                self.url + path,
                data=None if body is None else json.dumps(body).encode(),
                headers=self._headers,
            )
            # A proxy of the environment is not asked for a daemon that is usually on this machine.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            response: HTTPResponse = opener.open(request, timeout=timeout)
            return response
        except urllib.error.HTTPError as error:
            with error:
                said = message_in(error.read()) or str(error)
            hint = " Commands send the one in EMLXD_API_KEY." if error.code == 401 else ""
            raise Refused(error.code, said + hint) from None
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise UserError(
                f"No server answers at {self.url} ({reason}). Is `emlxd serve` running? "
                "--url names another address."
            ) from None


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        data = line.strip().removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)
