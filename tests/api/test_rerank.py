"""POST /v1/rerank, by a cross-encoder and by embeddings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from emlxd.core import TokenizedText
from tests.api.conftest import Server, start_server
from tests.api.test_errors import error_of
from tests.fakes import FakeEmbedder, FakeRegistry, FakeReranker

DOCUMENTS = ["xx", "ab", "ax", {"text": "aaaa"}]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with start_server(FakeRegistry(FakeReranker())) as running:
        yield running


async def rank(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "query": "abc", "documents": DOCUMENTS} | fields
    answer = await http.post("/v1/rerank", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_the_best_comes_first(server: Server, http: httpx.AsyncClient) -> None:
    answer = await rank(http)
    assert answer["results"] == [
        {"index": 1, "relevance_score": 1.0, "document": {"text": "ab"}},
        {"index": 3, "relevance_score": 1.0, "document": {"text": "aaaa"}},
        {"index": 2, "relevance_score": 0.5, "document": {"text": "ax"}},
        {"index": 0, "relevance_score": 0.0, "document": {"text": "xx"}},
    ]
    assert answer["model"] == "org/fake-1b"
    assert answer["id"].startswith("rerank-")
    count = 4 * len("abc") + len("xxabaxaaaa")
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert server.metric("emlxd_prompt_tokens_total", model="org/fake-1b") == count


async def test_only_so_many_and_without_their_text(http: httpx.AsyncClient) -> None:
    answer = await rank(http, top_n=1, return_documents=False)
    assert answer["results"] == [{"index": 1, "relevance_score": 1.0}]
    assert len((await rank(http, top_n=9))["results"]) == 4


async def test_a_long_document_is_cut_unless_the_client_minds(http: httpx.AsyncClient) -> None:
    long = ["a" * 997 + "x" * 997]
    assert (await rank(http, documents=long))["results"][0]["relevance_score"] == 1.0
    body = {"model": "fake", "query": "abc", "documents": long, "truncate": False}
    error = error_of(await http.post("/v1/rerank", json=body), 400)
    assert (error["param"], error["code"]) == ("documents", "context_length_exceeded")
    error = error_of(await http.post("/v1/rerank", json=body | {"query": "a" * 1000, "truncate": True}), 400)
    assert error["param"] == "query"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": ""}, "query"),
        ({"query": 1}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["a"] * 2049}, "documents"),
        ({"top_n": 0}, "top_n"),
    ],
)
async def test_refusals(http: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    body = {"model": "fake", "query": "a", "documents": ["b"]} | fields
    assert error_of(await http.post("/v1/rerank", json=body), 400)["param"] == param


async def test_embeddings_rank_by_their_cosine() -> None:
    """A fake vector is (first byte, length): the query's is (97, 1), with its prompt (113, 3)."""
    worker = FakeEmbedder(prompts={"query": "q ", "passage": ""})
    async with start_server(FakeRegistry(worker)) as running, httpx.AsyncClient(base_url=running.url) as http:
        answer = await rank(http, query="a", documents=["a" * 50, "qqq"])
    assert [result["index"] for result in answer["results"]] == [1, 0]
    assert answer["results"][0]["relevance_score"] == pytest.approx(1.0)
    assert 0 < answer["results"][1]["relevance_score"] < 0.99
    assert answer["usage"]["total_tokens"] == 3 + 50 + 3


async def test_a_model_that_writes_does_not_rank() -> None:
    async with start_server() as plain, httpx.AsyncClient(base_url=plain.url) as http:
        body = {"model": "fake", "query": "a", "documents": ["b"]}
        error = error_of(await http.post("/v1/rerank", json=body), 400)
        assert error["param"] == "model" and "does not rank" in error["message"]


async def test_a_pair_of_which_nothing_is_left_is_told(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer may drop spaces and add nothing of its own."""

    async def encode_pair(self: FakeReranker, first: str, second: str) -> TokenizedText:
        return TokenizedText(tuple((first + second).strip().encode()), len(first.strip()))

    monkeypatch.setattr(FakeReranker, "encode_pair", encode_pair)
    body = {"model": "fake", "query": " ", "documents": ["abc", "  "]}
    error = error_of(await http.post("/v1/rerank", json=body), 400)
    assert (error["param"], error["code"]) == ("query", "invalid_value")
