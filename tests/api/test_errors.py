"""Every mistake gets OpenAI's error body with the right status, and the SDK's right class."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from emlxd.errors import EmlxdError, QueueFull, ServerFault, Unavailable
from tests.api.conftest import Server

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
CONTINUE_AND_BEGIN = {"continue_final_message": True, "add_generation_prompt": True}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    return error


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"} | fields]}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"model": None}, "model", "invalid_type"),
        ({"messages": None}, "messages", "invalid_type"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": [7]}, "messages[0]", "invalid_type"),
        (message(role="wizard"), "messages[0].role", "invalid_value"),
        (message(content=7), "messages[0].content", "invalid_type"),
        (message(content=None), "messages[0].content", "missing_required_parameter"),
        (message(content=[]), "messages[0].content", "invalid_value"),
        (message(content=["a"]), "messages[0].content", "invalid_value"),
        (message(content=[{"type": "text"}]), "messages[0].content", "invalid_value"),
        (message(content=[{"type": "image_url", "image_url": {}}]), "messages[0].content", "invalid_value"),
        (message(content=[{"type": "input_audio"}]), "messages[0].content", "invalid_value"),
        (message(role="tool"), "messages[0].tool_call_id", "missing_required_parameter"),
        (message(role="assistant", content=None), "messages[0].content", "missing_required_parameter"),
        (message(tool_calls=[{"id": "a"}]), "messages[0].tool_calls[0].type", "missing_required_parameter"),
        ({"temperature": "1"}, "temperature", "invalid_type"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"temperature": -0.1}, "temperature", "invalid_value"),
        ({"top_p": 1.1}, "top_p", "invalid_value"),
        ({"top_k": 1.5}, "top_k", "invalid_type"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"min_p": 2}, "min_p", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 129}, "n", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"seed": 2**70}, "seed", "invalid_type"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"max_tokens": 2.5}, "max_tokens", "invalid_type"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
        ({"stop": 1}, "stop", "invalid_type"),
        ({"stop": ["a", 1]}, "stop", "invalid_type"),
        ({"stop": ["a"] * 5}, "stop", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "unsupported_parameter"),
        ({"length_penalty": 2.0}, "length_penalty", "unsupported_parameter"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "unsupported_parameter"),
        ({"echo": True}, "echo", "unsupported_parameter"),
        ({"stream": True, "stream_options": 1}, "stream_options", "invalid_type"),
        ({"stream_chunks": "line"}, "stream_chunks", "invalid_value"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_type"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "invalid_value"),
        (CONTINUE_AND_BEGIN, "continue_final_message", "invalid_value"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "invalid_value"),
        ({"presence_penalty": -3}, "presence_penalty", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"logit_bias": {"a": 2}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"256": 2}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"9" * 5000: 2}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "invalid_value"),
        ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
        ({"logprobs": 1}, "logprobs", "invalid_type"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"top_logprobs": 1}, "top_logprobs", "invalid_value"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs", "invalid_value"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens", "invalid_value"),
        ({"min_tokens": -1}, "min_tokens", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"store": True}, "store", "unsupported_parameter"),
        ({"ignore_eos": 1}, "ignore_eos", "invalid_type"),
        ({"guided_json": {"type": "object"}}, "guided_json", "unsupported_parameter"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "unsupported_parameter"),
        ({"stop_token_ids": [7]}, "stop_token_ids", "unsupported_parameter"),
    ],
)  # fmt: skip
async def test_bad_fields(
    server: Server, http: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str
) -> None:
    response = await http.post(CHAT, json={"model": "fake", "messages": HELLO} | fields)
    error = error_of(response, 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert param in error["message"] or code == "unsupported_parameter"
    assert server.worker.submitted == []


@pytest.mark.parametrize(
    "url", [CHAT, "/v1/messages", "/v1/responses", "/api/chat", "/v1/embeddings", "/tokenize"]
)
async def test_a_body_that_is_nested_too_deeply(http: httpx.AsyncClient, url: str) -> None:
    deep = '{"model": "fake", "x": ' + "[" * 300 + "]" * 300 + "}"
    response = await http.post(url, content=deep, headers={"content-type": "application/json"})
    assert response.status_code == 400 and "nested more than 200 levels" in response.text
    wide = {"model": "fake", "messages": HELLO, "x": [{"y": []}] * 300}
    assert (await http.post(CHAT, json=wide)).status_code == 200


async def test_messages_read_well(http: httpx.AsyncClient) -> None:
    async def told(**fields: Any) -> str:
        response = await http.post(CHAT, json={"model": "fake", "messages": HELLO} | fields)
        return str(error_of(response, 400)["message"])

    assert await told(temperature="hot") == (
        "Invalid type for 'temperature': expected a number, but got a string."
    )
    assert await told(temperature=3) == ("Invalid value for 'temperature': expected at most 2, but got 3.")
    assert await told(n=None, messages=[{"content": "x"}]) == (
        "Missing required parameter: 'messages[0].role'."
    )
    assert "'image_url'" in await told(**message(content=[{"type": "image_url"}]))
    assert await told(functions=[1]) == "The parameter 'functions' is not supported by this server."


async def test_missing_required(http: httpx.AsyncClient) -> None:
    for path, present, missing in [
        (CHAT, {"messages": HELLO}, "model"),
        (CHAT, {"model": "fake"}, "messages"),
        ("/v1/completions", {"model": "fake"}, "prompt"),
    ]:
        error = error_of(await http.post(path, json=present), 400)
        assert (error["param"], error["code"]) == (missing, "missing_required_parameter")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": 1e999}',
        b'{"a": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"a":' + b"[" * 100_000,
        b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"a": 1} {"b": 2}',
        '{"a": "é"}'.encode("utf-16"),
    ],
)
async def test_bad_bodies(http: httpx.AsyncClient, content: bytes) -> None:
    response = await http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert error_of(response, 400)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {"origin": "https://evil.example"},
    ],
)
async def test_unsupported_media(http: httpx.AsyncClient, headers: dict[str, str]) -> None:
    response = await http.post(CHAT, content=b"{}", headers=headers)
    assert error_of(response, 415)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "application/vnd.x+json", None])
async def test_supported_media(http: httpx.AsyncClient, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    body = b'{"model": "fake", "messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
    assert (await http.post(CHAT, content=body, headers=headers)).status_code == 200


@pytest.mark.parametrize("size", [34_000_000, 100_000_000])
@pytest.mark.parametrize("chunked", [True, False])
async def test_too_large(http: httpx.AsyncClient, size: int, chunked: bool) -> None:
    async def parts() -> Any:
        for _ in range(size // 1_000_000):
            yield b" " * 1_000_000

    headers = {"content-type": "application/json"} | ({} if chunked else {"content-length": str(size)})
    response = await http.post(CHAT, content=parts(), headers=headers)
    assert error_of(response, 413)["code"] == "payload_too_large"
    assert (await http.get("/health")).status_code == 200


async def test_unknown_urls(http: httpx.AsyncClient) -> None:
    for path in [
        "/v1",
        "/v1/",
        "/v1/chat",
        "/favicon.ico",
        "//v1/models",
        "/v1//models",
        "/%00",
        "/%ff",
    ]:
        assert error_of(await http.get(path), 404)["code"] == "unknown_url"
    assert error_of(await http.post("/nowhere", content=b"x" * 1_000_000), 404)["code"] == "unknown_url"


async def test_an_error_does_not_repeat_all_that_was_sent(http: httpx.AsyncClient) -> None:
    long = "x" * 50_000
    for answer in (
        await http.post(CHAT, json={"model": long, "messages": HELLO}),
        await http.post("/api/chat", json={"model": long, "messages": HELLO}),
        await http.get(f"/v1/models/{long}"),
        await http.get(f"/{long}"),
        await http.put(f"/v1/models/{long}"),
    ):
        assert 400 <= answer.status_code < 500 and len(answer.content) < 500


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", CHAT, "OPTIONS, POST"),
        ("PUT", CHAT, "OPTIONS, POST"),
        ("DELETE", "/v1/models", "GET, HEAD, OPTIONS"),
        ("POST", "/health", "GET, HEAD, OPTIONS"),
        ("BREW", CHAT, "OPTIONS, POST"),
    ],
)
async def test_wrong_method(http: httpx.AsyncClient, method: str, path: str, allow: str) -> None:
    response = await http.request(method, path)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == allow


async def test_head_and_options(http: httpx.AsyncClient) -> None:
    for path in ["/health", "/v1/models", "/v1/models/fake"]:
        head, get = await http.head(path), await http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(get.content))
    assert (await http.head(CHAT)).status_code == 405
    options = await http.options(CHAT)
    assert (options.status_code, options.content, options.headers["allow"]) == (204, b"", "OPTIONS, POST")
    assert "content-type" not in options.headers
    assert error_of(await http.options("/nowhere"), 404)


async def test_trailing_slashes(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/models/")).json()["object"] == "list"
    assert (await http.get("/health/")).status_code == 200
    assert (await http.get("/v1/models/org/fake-1b/")).json()["id"] == "org/fake-1b"
    response = await http.post(CHAT + "/", json={"model": "fake", "messages": HELLO})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("failure", "kind", "retry_after"),
    [
        (QueueFull("full"), openai.RateLimitError, "1"),
        (Unavailable("loading", retry_after=3), openai.InternalServerError, "3"),
        (ServerFault("broken"), openai.InternalServerError, None),
    ],
)
async def test_failures_before_any_byte(
    server: Server,
    client: openai.AsyncOpenAI,
    failure: EmlxdError,
    kind: type[openai.APIStatusError],
    retry_after: str | None,
) -> None:
    """Whether the registry refuses or the generation fails after some words."""
    for refusal, generation_failure in [(failure, None), (None, failure)]:
        server.registry.refusal, server.worker.failure = refusal, generation_failure
        server.worker.fail_after = 2
        with pytest.raises(kind) as caught:
            await client.chat.completions.create(model="fake", messages=HELLO)
        assert caught.value.status_code == failure.status
        assert (caught.value.body, caught.value.type) == (
            {"message": failure.message, "type": failure.type, "param": None, "code": failure.code},
            failure.type,
        )
        assert caught.value.response.headers.get("retry-after") == retry_after


async def test_unexpected_exception_is_a_plain_500(server: Server, http: httpx.AsyncClient) -> None:
    """Edge case 14."""
    server.worker.submit = None  # type: ignore[method-assign,assignment]
    response = await http.post(CHAT, json={"model": "fake", "messages": HELLO})
    error = error_of(response, 500)
    assert error["type"] == "server_error" and "NoneType" not in error["message"]
    assert server.registry.leased == 0


async def test_sdk_classes(client: openai.AsyncOpenAI) -> None:
    """Edge case 13."""
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-none", messages=HELLO)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-none")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="fake", messages=[])
    assert bad.value.param == "messages"
    with pytest.raises(openai.NotFoundError):
        await client.images.generate(prompt="a cat")


async def test_prompt_over_the_context(client: openai.AsyncOpenAI) -> None:
    """Edge case 20."""
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 1200}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert "1000" in caught.value.message and str(1200 + len("user:\n")) in caught.value.message
