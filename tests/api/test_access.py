"""Keys, CORS, and who may operate the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from quart import Blueprint, Quart, Response

from emlxd.api import access
from emlxd.api.exchange import ExchangeMiddleware
from emlxd.config import MetricsSettings, ServerSettings, Settings
from emlxd.errors import UserError
from emlxd.metrics import Metrics
from tests.api.conftest import Server, start_server
from tests.api.test_errors import error_of

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
PAGE = "https://chat.example.com"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}


def http_of(server: Server, **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, headers=headers, verify=False)


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer second-key"},
        {"Authorization": "bearer second-key"},
        {"x-api-key": "first-key"},
        {"Authorization": "Basic eDp5", "x-api-key": "first-key"},
    ],
)
async def test_a_known_key_is_let_in(headers: dict[str, str]) -> None:
    async with (
        start_server(api_keys=("first-key", "second-key")) as server,
        http_of(server, **headers) as http,
    ):
        assert (await http.post(CHAT, json=BODY)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer first-ke"},
        {"Authorization": "Bearer first-key2"},
        {"Authorization": "first-key"},
        {"Authorization": "Basic first-key"},
        {"x-api-key": ""},
        {"x-api-key": "FIRST-KEY"},
        {"Authorization": "Bearer wrong", "x-api-key": "first-key"},
    ],
)
async def test_without_a_known_key_nothing_is_told(headers: dict[str, str]) -> None:
    async with start_server(api_keys=("first-key",)) as server, http_of(server, **headers) as http:
        for method, path in [("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/nowhere")]:
            refused = await http.request(method, path)
            assert error_of(refused, 401)["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
            assert "first-key" not in refused.text
        assert server.worker.submitted == []


async def test_supervisors_need_no_key() -> None:
    async with start_server(api_keys=("first-key",)) as server, http_of(server) as http:
        for path in ["/health", "/ready", "/health/"]:
            assert (await http.get(path)).status_code == 200


async def test_metrics_may_be_open() -> None:
    app = Quart(__name__)
    settings = Settings(
        server=ServerSettings(api_keys=("first-key",)), metrics=MetricsSettings(require_key=False)
    )
    access.install(app, settings)
    app.add_url_rule("/metrics", "metrics", lambda: "ok")
    assert (await app.test_client().get("/metrics")).status_code == 200


async def test_the_sdks_send_their_keys() -> None:
    async with start_server(api_keys=("first-key",)) as server:
        plain = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="first-key", http_client=plain
        ) as sdk:
            assert (await sdk.models.list()).data
        plain = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", http_client=plain) as sdk:
            with pytest.raises(openai.AuthenticationError):
                await sdk.models.list()


def test_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nabc\n\n  def  # ann\n")
    file.chmod(0o600)
    assert access.read_keys(ServerSettings(api_keys=("first-key",), api_keys_file=file)) == [
        b"first-key",
        b"abc",
        b"def",
    ]
    file.write_text("# none\n")
    file.chmod(0o600)
    with pytest.raises(UserError, match="has no keys"):
        access.read_keys(ServerSettings(api_keys_file=file))
    with pytest.raises(UserError, match="Cannot read"):
        access.read_keys(ServerSettings(api_keys_file=tmp_path / "missing"))


async def test_preflight_with_a_key_set_edge_case_16() -> None:
    async with start_server(api_keys=("k-1",), cors_origins=(PAGE,)) as server, http_of(server) as http:
        asked = PREFLIGHT | {"Access-Control-Request-Headers": "authorization,x-stainless-os"}
        allowed = await http.options(CHAT, headers=asked)
        assert (allowed.status_code, allowed.content) == (204, b"")
        assert allowed.headers["access-control-allow-origin"] == PAGE
        assert allowed.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
        assert "POST" in allowed.headers["access-control-allow-methods"]
        refused = await http.post(CHAT, json=BODY, headers={"Origin": PAGE})
        assert error_of(refused, 401)
        assert refused.headers["access-control-allow-origin"] == PAGE
        assert refused.headers["vary"] == "Origin"
        missing = await http.get("/nowhere", headers={"Origin": PAGE, "x-api-key": "k-1"})
        assert (missing.status_code, missing.headers["access-control-allow-origin"]) == (404, PAGE)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_allowed_page_reads_answers(stream: bool) -> None:
    async with start_server(cors_origins=(PAGE,)) as server, http_of(server, Origin=PAGE) as http:
        answer = await http.post(CHAT, json=BODY | {"stream": stream})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)


@pytest.mark.parametrize(
    "origin", ["https://evil.example.com", PAGE + ".evil.com", PAGE + ":444", "null", ""]
)
async def test_other_pages_are_told_nothing(origin: str) -> None:
    async with start_server(cors_origins=(PAGE,)) as server, http_of(server, Origin=origin) as http:
        for answer in [
            await http.options(CHAT, headers=PREFLIGHT | {"Origin": origin}),
            await http.post(CHAT, json=BODY),
        ]:
            assert not [name for name in answer.headers if name.startswith("access-control")]
            assert answer.headers["vary"] == "Origin"


async def test_cors_is_off_by_default(http: httpx.AsyncClient) -> None:
    for answer in [await http.options(CHAT, headers=PREFLIGHT), await http.get("/health", headers=PREFLIGHT)]:
        assert not [name for name in answer.headers if name.startswith("access-control") or name == "vary"]


@pytest.mark.parametrize("origin", ["*", "https://a.com/", "a.com", "https://a.com/path"])
def test_an_origin_is_exact(origin: str) -> None:
    with pytest.raises(ValueError, match="expected an origin"):
        ServerSettings(cors_origins=(origin,))


def admin_app(**server: Any) -> Quart:
    app = Quart(__name__)
    access.install(app, Settings(server=ServerSettings(**server)))
    blueprint = Blueprint("admin", __name__)
    blueprint.add_url_rule("/admin/thing", "thing", lambda: Response("done"))
    app.register_blueprint(blueprint)
    app.register_error_handler(Exception, lambda error: Response(error.message, error.status))
    app.asgi_app = ExchangeMiddleware(app.asgi_app, Metrics(device="fake"))  # type: ignore[method-assign]
    return app


@pytest.mark.parametrize(
    ("address", "headers", "status"),
    [
        ("127.0.0.1", {}, 200),
        ("127.8.8.8", {}, 200),
        ("::1", {}, 200),
        ("::ffff:127.0.0.1", {}, 200),
        ("10.0.0.7", {}, 403),
        ("::ffff:10.0.0.7", {}, 403),
        ("<local>", {}, 403),
        ("127.0.0.1", {"Origin": "https://evil.example.com"}, 403),
        ("127.0.0.1", {"Origin": PAGE}, 403),
        ("127.0.0.1", {"Origin": "http://localhost:8420", "Host": "localhost:8420"}, 200),
        ("127.0.0.1", {"Origin": "http://[::1]:8420", "Host": "[::1]:8420"}, 200),
        ("127.0.0.1", {"Host": "rebound.example.com"}, 403),
        ("127.0.0.1", {"Origin": "http://rebound.example.com", "Host": "rebound.example.com"}, 403),
    ],
)
async def test_without_keys_only_this_machine_operates(
    address: str, headers: dict[str, str], status: int
) -> None:
    client = admin_app(cors_origins=(PAGE,)).test_client()
    answer = await client.get("/admin/thing", headers=headers, scope_base={"client": (address, 1)})
    assert answer.status_code == status


@pytest.mark.parametrize(("key", "status"), [("k-1", 200), ("k-2", 401)])
async def test_with_keys_a_key_operates(key: str, status: int) -> None:
    client = admin_app(api_keys=("k-1",)).test_client()
    scope = {"client": ("10.0.0.7", 1)}
    answer = await client.get("/admin/thing", headers={"x-api-key": key}, scope_base=scope)
    assert answer.status_code == status


def test_keys_do_not_show() -> None:
    settings = ServerSettings(api_keys=("first-key",))
    assert "first-key" not in repr(settings) and "first-key" not in settings.model_dump_json()
