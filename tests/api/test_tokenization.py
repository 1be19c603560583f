"""POST /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tests.api.conftest import Server
from tests.api.test_errors import error_of
from tests.fakes import ByteTokenizer

CHAT: list[Any] = [{"role": "user", "content": "hi"}]


async def test_a_text(http: httpx.AsyncClient) -> None:
    answer = await http.post("/tokenize", json={"model": "fake", "prompt": "né"})
    assert answer.json() == {
        "count": 3,
        "max_model_len": 1000,
        "tokens": [110, 195, 169],
        "token_strs": None,
    }
    named = await http.post("/tokenize", json={"model": "fake", "prompt": "né", "return_token_strs": True})
    assert named.json()["token_strs"] == ["n", "bytes:\\xc3", "bytes:\\xa9"]
    assert (await http.post("/tokenize", json={"model": "fake", "prompt": ""})).json()["tokens"] == []


@pytest.mark.parametrize(("asked", "special"), [(None, True), (True, True), (False, False)])
async def test_special_tokens(
    server: Server, http: httpx.AsyncClient, asked: bool | None, special: bool
) -> None:
    await http.post("/tokenize", json={"model": "fake", "prompt": "a", "add_special_tokens": asked})
    assert server.worker.encoded[-1] == ("a", special)


async def test_a_conversation_is_counted_as_it_would_be_answered(
    server: Server, http: httpx.AsyncClient
) -> None:
    body = {"model": "fake", "messages": CHAT, "chat_template_kwargs": {"a": 1}}
    counted = (await http.post("/tokenize", json=body)).json()
    answered = (await http.post("/v1/chat/completions", json=body)).json()
    assert counted["count"] == answered["usage"]["prompt_tokens"] == len(counted["tokens"])
    assert server.worker.chats[0] == server.worker.chats[1]


async def test_detokenize_undoes_tokenize(http: httpx.AsyncClient) -> None:
    tokens = (await http.post("/tokenize", json={"model": "fake", "prompt": "né 😀"})).json()["tokens"]
    assert (await http.post("/detokenize", json={"model": "fake", "tokens": tokens})).json() == {
        "prompt": "né 😀"
    }
    assert (await http.post("/detokenize", json={"model": "fake", "tokens": []})).json() == {"prompt": ""}


class WithSpecial(ByteTokenizer):
    """Token 1 is special."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join("<s>" * (not skip_special_tokens) if id == 1 else chr(id) for id in ids)


async def test_special_tokens_are_written_out(server: Server, http: httpx.AsyncClient) -> None:
    server.worker.tokenizer = WithSpecial()
    answer = await http.post("/detokenize", json={"model": "fake", "tokens": [1, 97]})
    assert answer.json() == {"prompt": "<s>a"}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": CHAT, "tools": [{}]}, "tools[0].type"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [256]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
async def test_refusals(http: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str) -> None:
    assert error_of(await http.post(path, json={"model": "fake"} | fields), 400)["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_unknown_model(http: httpx.AsyncClient, path: str) -> None:
    response = await http.post(path, json={"model": "none", "prompt": "a", "tokens": []})
    assert error_of(response, 404)["code"] == "model_not_found"
