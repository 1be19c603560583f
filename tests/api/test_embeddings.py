"""POST /v1/embeddings through OpenAI's own client, held to its types."""

from __future__ import annotations

import base64
import struct
from collections.abc import AsyncIterator
from math import hypot
from typing import Any

import httpx
import openai
import pytest
from openai.types import CreateEmbeddingResponse

from tests.api.conftest import Server, start_server
from tests.api.strict import assert_known_fields
from tests.api.test_errors import error_of
from tests.fakes import FakeEmbedder, FakeRegistry


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with start_server(FakeRegistry(FakeEmbedder())) as running:
        yield running


def unit(*values: float) -> list[float]:
    return [value / hypot(*values) for value in values]


@pytest.mark.parametrize(
    ("given", "vectors"),
    [
        ("ab", [unit(97, 2, 0, 0)]),
        (["ab", "c"], [unit(97, 2, 0, 0), unit(99, 1, 0, 0)]),
        ([97, 98], [unit(97, 2, 0, 0)]),
        ([[97], [98, 99]], [unit(97, 1, 0, 0), unit(98, 2, 0, 0)]),
    ],
)
@pytest.mark.parametrize("encoding", ["float", "base64", None])
async def test_inputs_and_encodings(
    client: openai.AsyncOpenAI, given: Any, vectors: list[list[float]], encoding: Any
) -> None:
    """Edge case 22: the SDK asks for base64 unless told otherwise, and shows floats all the same."""
    asked = {} if encoding is None else {"encoding_format": encoding}
    answer = await client.embeddings.create(model="fake", input=given, **asked)
    assert_known_fields(answer)
    assert (answer.object, answer.model) == ("list", "org/fake-1b")
    assert [(one.object, one.index) for one in answer.data] == [
        ("embedding", place) for place in range(len(vectors))
    ]
    for one, vector in zip(answer.data, vectors, strict=True):
        found: Any = one.embedding
        if encoding == "base64":
            found = struct.unpack("<4f", base64.b64decode(found))
        assert found == pytest.approx(vector, abs=1e-6)
    count = sum(map(len, given)) if isinstance(given[0], list) else len("".join(map(str, given)))
    if given == [97, 98]:
        count = 2
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    if encoding != "base64":
        CreateEmbeddingResponse.model_validate(answer.model_dump(), strict=True)


async def test_dimensions(http: httpx.AsyncClient) -> None:
    body = {"model": "fake", "input": "ab", "dimensions": 1}
    answer = await http.post("/v1/embeddings", json=body)
    assert answer.json()["data"][0]["embedding"] == [1.0]
    assert (
        error_of(await http.post("/v1/embeddings", json=body | {"dimensions": 5}), 400)["param"]
        == "dimensions"
    )


async def test_prompts_go_before_texts_of_a_kind() -> None:
    worker = FakeEmbedder(prompts={"query": "q: "})
    async with start_server(FakeRegistry(worker)) as running, httpx.AsyncClient(base_url=running.url) as http:
        body = {"model": "fake", "input": ["ab"], "prompt_name": "query"}
        answer = (await http.post("/v1/embeddings", json=body)).json()
        assert answer["data"][0]["embedding"] == pytest.approx(unit(ord("q"), 5, 0, 0))
        assert answer["usage"]["prompt_tokens"] == 5
        tokens = (await http.post("/v1/embeddings", json=body | {"input": [97, 98]})).json()
        assert tokens["data"][0]["embedding"] == pytest.approx(unit(97, 2, 0, 0))
        refused = await http.post("/v1/embeddings", json=body | {"prompt_name": "answer"})
        assert error_of(refused, 400)["param"] == "prompt_name"


async def test_a_long_text_is_cut_if_the_client_says_so(http: httpx.AsyncClient) -> None:
    body = {"model": "fake", "input": ["x" * 1001, "y"], "truncate": True}
    answer = (await http.post("/v1/embeddings", json=body)).json()
    assert answer["data"][0]["embedding"] == pytest.approx(unit(ord("x"), 1000, 0, 0))
    assert answer["usage"]["prompt_tokens"] == 1001
    error = error_of(await http.post("/v1/embeddings", json=body | {"truncate": False}), 400)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


async def test_tokens_are_counted(server: Server, http: httpx.AsyncClient) -> None:
    await http.post("/v1/embeddings", json={"model": "fake", "input": ["ab", "c"]})
    assert server.metric("emlxd_prompt_tokens_total", model="org/fake-1b") == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [256]}, "input"),
        ({"input": None}, "input"),
        ({"input": "x" * 1001}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({}, "input"),
    ],
)
async def test_refusals(http: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    error = error_of(await http.post("/v1/embeddings", json={"model": "fake"} | fields), 400)
    assert error["param"] == param


async def test_a_model_that_does_not_embed() -> None:
    async with start_server() as plain, httpx.AsyncClient(base_url=plain.url) as http:
        refused = await http.post("/v1/embeddings", json={"model": "fake", "input": "a"})
        error = error_of(refused, 400)
        assert error["param"] == "model" and "does not make embeddings" in error["message"]
