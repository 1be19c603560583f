"""The page's files over HTTP: policy, cache, size, and that they are all there is."""

from __future__ import annotations

import re
from importlib.resources import files

import httpx
import pytest

from tests.api.conftest import start_server
from tests.api.test_errors import error_of

WEB = files("emlxd.api") / "web"
NAMES = sorted(file.name for file in WEB.iterdir())
SOURCES = {name: (WEB / name).read_text() for name in NAMES}


async def test_the_page_and_its_policy(http: httpx.AsyncClient) -> None:
    answer = await http.get("/")
    assert (answer.status_code, answer.text) == (200, SOURCES["index.html"])
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[kind] for kind in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert policy["frame-ancestors"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", NAMES)
async def test_an_unchanged_file_is_not_sent_again(http: httpx.AsyncClient, name: str) -> None:
    first = await http.get(f"/web/{name}")
    assert first.text == SOURCES[name]
    again = await http.get(f"/web/{name}", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = await http.get(f"/web/{name}", headers={"If-None-Match": '"other"'})
    assert other.status_code == 200


@pytest.mark.parametrize("name", ["none.js", "..%2fpage.py", "../page.py"])
async def test_other_files_are_not_served(http: httpx.AsyncClient, name: str) -> None:
    error_of(await http.get(f"/web/{name}"), 404)


async def test_the_page_comes_without_a_key_and_the_daemon_does_not() -> None:
    async with (
        start_server(api_keys=("k-1",)) as server,
        httpx.AsyncClient(base_url=server.url, verify=False) as http,
    ):
        assert (await http.get("/")).status_code == 200
        assert (await http.get("/web/app.js")).status_code == 200
        error_of(await http.get("/v1/models"), 401)


def test_it_is_small() -> None:
    assert sum(len(text.encode()) for text in SOURCES.values()) < 150_000


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    page = SOURCES["index.html"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page)
    links = re.findall(r"(?:src|href)=\"([^\"]+)\"", page)
    assert {link.removeprefix("web/") for link in links} <= set(NAMES)
    for name, text in SOURCES.items():
        for module in re.findall(r"from \"([^\"]+)\"", text):
            assert module.removeprefix("./") in NAMES
        assert not re.search(
            r"url\(|@import|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text
        ), name
