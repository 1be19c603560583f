"""Big requests do not hold up the event loop: what takes long runs on another thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import httpx
import orjson
import pytest

from emlxd.api import body, embeddings, fields, offload, prompts, rerank, respond, schema
from tests.api.conftest import start_server
from tests.fakes import ByteTokenizer, FakeEmbedder, FakeRegistry, FakeWorker, fake_info

MANY = offload.LARGE_COUNT + 1
NUMBERS = [65] * (offload.LARGE_ARRAY + 1)
TURNS = [{"role": "user", "content": "a"}] * MANY
TEXTS = ["a"] * 150  # with vectors of as many numbers
LONG = "a" * (offload.LARGE_TEXT + 1)


class Witness:
    """Notes on which threads functions of the product are called."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.threads: set[threading.Thread] = set()

    def watch(self, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            self.threads.add(threading.current_thread())
            return real(*args, **options)

        self._patch.setattr(owner, name, watched)

    @property
    def beside(self) -> bool:
        return bool(self.threads) and threading.current_thread() not in self.threads


@pytest.fixture
def witness(monkeypatch: pytest.MonkeyPatch) -> Witness:
    return Witness(monkeypatch)


def registry(**says: Any) -> FakeRegistry:
    return FakeRegistry(FakeWorker(info=fake_info(max_context=100_000), **says))


async def post(url: str, path: str, sent: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=20, verify=False) as client:
        return await client.post(path, json={"model": "fake", "max_tokens": 1, "stream": False} | sent)


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}),
        ("/api/chat", {"messages": [{"role": "user", "content": LONG}]}),
        ("/api/generate", {"prompt": LONG}),
        ("/tokenize", {"prompt": LONG}),
        ("/detokenize", {"tokens": NUMBERS}),
    ],
)
async def test_large_bodies_are_parsed_and_checked_beside_the_loop(
    witness: Witness, path: str, sent: dict[str, Any]
) -> None:
    witness.watch(body, "_parse")
    async with start_server(registry()) as server:
        assert (await post(server.url, path, sent)).status_code == 200
    assert witness.beside


async def test_small_bodies_are_not_worth_a_thread(witness: Witness) -> None:
    witness.watch(body, "_parse")
    async with start_server(registry()) as server:
        await post(server.url, "/v1/completions", {"prompt": "a"})
    assert witness.threads == {threading.current_thread()}


async def test_mistakes_in_large_bodies_are_found_beside_it_too(witness: Witness) -> None:
    witness.watch(fields, "request_error")
    async with start_server(registry()) as server:
        answer = await post(server.url, "/v1/completions", {"prompt": LONG, "temperature": 3})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "temperature"
    assert witness.beside


@pytest.mark.parametrize(
    ("owner", "name", "path", "sent"),
    [
        (schema.Message, "for_template", "/v1/chat/completions", {"messages": TURNS}),
        (schema.Message, "for_template", "/tokenize", {"messages": TURNS}),
        (prompts, "check_tokens", "/v1/completions", {"prompt": NUMBERS}),
        (ByteTokenizer, "token_bytes", "/tokenize", {"prompt": LONG, "return_token_strs": True}),
        (ByteTokenizer, "decode", "/detokenize", {"tokens": NUMBERS}),
    ],
)
async def test_what_is_made_of_them_is_made_beside_it(
    witness: Witness, owner: Any, name: str, path: str, sent: dict[str, Any]
) -> None:
    witness.watch(owner, name)
    async with start_server(registry()) as server:
        assert (await post(server.url, path, sent)).status_code == 200
    assert witness.beside


async def test_long_answers_are_written_beside_it(witness: Witness) -> None:
    for module in (embeddings, respond):
        witness.watch(module, "dump_in_parts")
    words = ["a"] * MANY
    async with start_server(registry(words=words)) as server:
        answer = await post(server.url, "/v1/completions", {"prompt": "a", "max_tokens": MANY, "n": 2})
        assert answer.json()["choices"][1]["text"] == "a" * MANY
    async with start_server(FakeRegistry(FakeEmbedder(size=len(TEXTS)))) as server:
        for path, key in (("/v1/embeddings", "data"), ("/api/embed", "embeddings")):
            answer = await post(server.url, path, {"input": TEXTS})
            assert len(answer.json()[key]) == len(TEXTS)
    assert witness.beside


async def test_documents_are_compared_beside_it(witness: Witness) -> None:
    witness.watch(rerank, "_cosine")
    async with start_server(FakeRegistry(FakeEmbedder(size=len(TEXTS)))) as server:
        answer = await post(server.url, "/v1/rerank", {"query": "a", "documents": TEXTS})
        assert len(answer.json()["results"]) == len(TEXTS)
    assert witness.beside


@pytest.mark.parametrize(
    ("path", "field", "first"),
    [
        ("/v1/chat/completions", "messages", "messages[0]"),
        ("/v1/messages", "messages", "messages[0]"),
        ("/v1/responses", "input", "input[0]"),
        ("/api/chat", "messages", "messages[0]"),
        ("/detokenize", "tokens", "tokens[0]"),
    ],
)
async def test_the_first_mistake_of_a_list_ends_its_check(
    monkeypatch: pytest.MonkeyPatch, path: str, field: str, first: str
) -> None:
    monkeypatch.setattr(fields, "MOST_MISTAKES", 1)
    async with start_server() as server:
        answer = await post(server.url, path, {field: [None, None, None]})
    assert answer.status_code == 400 and f"'{first}" in answer.text


async def test_countless_mistakes_are_counted_and_not_looked_at() -> None:
    biases = {str(token): "much" for token in range(1001)}
    async with start_server() as server:
        answer = await post(server.url, "/v1/completions", {"prompt": "a", "logit_bias": biases})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "The request body has 1001 mistakes."


def test_what_is_dumped_in_parts_is_the_same() -> None:
    values: Sequence[dict[str, Any]] = (
        {"data": [{"a": [1.5, 2]}, {"a": []}], "usage": {"n": 3}, "none": None},
        {"embeddings": [[1.0, 2.0], [3.0]], "tokens": [1, 2], "empty": []},
    )
    for value in values:
        assert orjson.loads(offload.dump_in_parts(value)) == value


async def test_a_request_has_a_limited_number_of_prompts() -> None:
    async with start_server(registry()) as server:
        answer = await post(server.url, "/v1/completions", {"prompt": ["a"] * 2049})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prompt")
    assert error["message"] == "Invalid value for 'prompt': expected 2048 or fewer items, but got 2049."
