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
        models = self._read("/v1/models")["data"]
        return [model["id"] for model in models if model.get("kind", "chat") == "chat"]

    def states(self) -> tuple[dict[str, str], str]:
        """Each model's state, and what is to be said when not all is well."""
        try:
            return self._read("/ready")["models"], ""
        except UserError as error:
            return {}, error.message

    def status(self) -> dict[str, Any]:
        """What /admin/status says."""
        return self._read("/admin/status")

    def requests(self) -> list[dict[str, Any]]:
        """What runs now."""
        requests: list[dict[str, Any]] = self._read("/admin/requests")["requests"]
        return requests

    def healthy(self) -> bool:
        """Whether it is emlxd that answers."""
        try:
            return self._read("/health") == {"status": "ok"}
        except UserError:
            return False

    def reload(self, *, dry_run: bool) -> dict[str, list[str]]:
        """What changed, or would, by kind of change."""
        path = f"/admin/reload?dry_run={'true' if dry_run else 'false'}"
        plan: dict[str, list[str]] = self._read(path, {}, RELOAD_TIMEOUT)["plan"]
        return plan

    def chat(self, model: str, messages: Sequence[Message]) -> Generator[str]:
        """The answer, piece by piece. Closing the iterator stops the generation."""
        body = {"model": model, "messages": list(messages), "stream": True}
        with self._open("/v1/chat/completions", body, STREAM_TIMEOUT) as response:
            try:
                for data in _events(response):
                    if (refusal := message_in(data)) is not None:
                        raise Refused(500, refusal)
                    for choice in json.loads(data)["choices"]:
                        yield choice["delta"].get("content") or ""
            except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
                raise UserError(f"The answer of {self.url} broke off ({error!r}).") from None

    def _read(self, path: str, body: Any = None, timeout: float = CONNECT_TIMEOUT) -> dict[str, Any]:
        """The JSON object that is answered."""
        with self._open(path, body, timeout) as response:
            try:
                found: dict[str, Any] = json.load(response)
            except (OSError, HTTPException, ValueError) as error:
                raise UserError(f"The answer of {self.url} broke off ({error!r}).") from None
            return found

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


def _events(response: HTTPResponse) -> Iterator[bytes]:
    """The data of each event. Raises HTTPException if they end before the answer does."""
    for line in response:
        if line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield data
    raise HTTPException("the last event did not come")
