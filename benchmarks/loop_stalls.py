"""How long the daemon answers nobody else while it is given big requests.

python benchmarks/loop_stalls.py

The daemon is a process of its own with the default configuration. While it has each of the requests,
/health is asked again and again; shown is the slowest answer. A word after the command chooses requests.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import daemon
import yaml

CONFIG = Path("config/config.yaml")
TEXT = "The quick brown fox jumps over the lazy dog. "


def text(nbytes: int) -> str:
    return TEXT * (nbytes // len(TEXT))


def chat(count: int, words: str = "Hello there.") -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[turn % 2], "content": words} for turn in range(count)] + [
        {"role": "user", "content": "Go on."}
    ]


def numbers(count: int) -> list[int]:
    return [token % 40_000 + 20 for token in range(count)]


Make = Callable[[], dict[str, Any]]
LLM, EMBEDDER = {"model": "default"}, {"model": "minilm"}  # aliases in the configuration
CALLS: dict[str, tuple[str, Make]] = {
    "nothing": ("/tokenize", lambda: LLM | {"prompt": "a"}),
    "tokenize 4 MB": ("/tokenize", lambda: LLM | {"prompt": text(4_000_000)}),
    "tokenize 4 MB, strings": (
        "/tokenize",
        lambda: LLM | {"prompt": text(4_000_000), "return_token_strs": True},
    ),
    "detokenize 1,000,000 tokens": ("/detokenize", lambda: LLM | {"tokens": numbers(1_000_000)}),
    "detokenize 4,000,000 tokens": ("/detokenize", lambda: LLM | {"tokens": numbers(4_000_000)}),
    "tokenize chat of 10,000 messages": ("/tokenize", lambda: LLM | {"messages": chat(10_000)}),
    "chat of 10,000 messages": ("/v1/chat/completions", lambda: LLM | {"messages": chat(10_000)}),
    "messages of 10,000 messages": (
        "/v1/messages",
        lambda: LLM | {"max_tokens": 5, "messages": chat(10_000)},
    ),
    "responses of 10,000 items": ("/v1/responses", lambda: LLM | {"input": chat(10_000)}),
    "Ollama's chat of 10,000 messages": ("/api/chat", lambda: LLM | {"messages": chat(10_000)}),
    "chat of 100,000 messages": ("/v1/chat/completions", lambda: LLM | {"messages": chat(100_000)}),
    "chat of 5 MB": ("/v1/chat/completions", lambda: LLM | {"messages": chat(0) + chat(1, text(5_000_000))}),
    "completion of 5 MB": ("/v1/completions", lambda: LLM | {"prompt": text(5_000_000)}),
    "completion of 2,000,000 tokens": ("/v1/completions", lambda: LLM | {"prompt": numbers(2_000_000)}),
    "completion of 100,000 prompts": ("/v1/completions", lambda: LLM | {"prompt": ["a"] * 100_000}),
    "messages of 5 MB": (
        "/v1/messages",
        lambda: LLM | {"max_tokens": 5, "messages": chat(1, text(5_000_000))},
    ),
    "responses of 5 MB": ("/v1/responses", lambda: LLM | {"input": text(5_000_000)}),
    "Ollama's generate of 5 MB": ("/api/generate", lambda: LLM | {"prompt": text(5_000_000)}),
    "chat with 100,000 unknown fields": (
        "/v1/chat/completions",
        lambda: LLM | {f"x{name}": name for name in range(100_000)} | {"messages": chat(1), "max_tokens": 1},
    ),
    "chat with 40,000 biases": (
        "/v1/chat/completions",
        lambda: (
            LLM
            | {"logit_bias": dict.fromkeys(map(str, range(40_000)), 1), "messages": chat(0), "max_tokens": 1}
        ),
    ),
    "100,000 mistakes": ("/v1/chat/completions", lambda: LLM | {"messages": [1] * 100_000}),
    "choice of 20,000": (
        "/v1/chat/completions",
        lambda: LLM | {"choice": [f"word{n}" for n in range(20_000)], "messages": chat(0), "max_tokens": 1},
    ),
    "embeddings of 2,048 texts": ("/v1/embeddings", lambda: EMBEDDER | {"input": ["one two"] * 2048}),
    "embeddings of 2,048 texts, base64": (
        "/v1/embeddings",
        lambda: EMBEDDER | {"input": ["one two"] * 2048, "encoding_format": "base64", "dimensions": 383},
    ),
    "Ollama's embeddings of 8,000 texts": ("/api/embed", lambda: EMBEDDER | {"input": ["one two"] * 8000}),
    "rerank of 2,048 texts": (
        "/v1/rerank",
        lambda: EMBEDDER | {"query": "one", "documents": ["one two"] * 2048},
    ),
}


class Poll:
    """The slowest answer of /health while it is entered, in seconds."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.slowest = 0.0

    def _ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        while not self._over.is_set():
            began = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            self.slowest = max(self.slowest, time.perf_counter() - began)
            time.sleep(0.005)
        connection.close()

    def __enter__(self) -> Poll:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def post(port: int, path: str, body: bytes) -> tuple[int, int]:
    """The status, and how many bytes were answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    size = len(answer.read())
    connection.close()
    return answer.status, size


def measure(port: int, wanted: str) -> None:
    post(port, "/v1/embeddings", json.dumps(EMBEDDER | {"input": "a"}).encode())
    print(f"{'':36}{'status':>8}{'answer':>12}{'took':>10}{'slowest /health':>17}")
    for name, (path, make) in CALLS.items():
        if wanted not in name:
            continue
        body = json.dumps(make()).encode()
        with Poll(port) as poll:
            began = time.perf_counter()
            status, size = post(port, path, body)
            took = time.perf_counter() - began
        print(f"{name:36}{status:>8}{size:>12}{took:>8.2f} s{1000 * poll.slowest:>14.0f} ms", flush=True)


def main() -> None:
    with daemon.running(yaml.safe_load(CONFIG.read_text())) as port:
        measure(port, sys.argv[1] if len(sys.argv) > 1 else "")


main()
