"""A real Chromium in front of a daemon with fake workers. Skipped where either half is missing."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.daemon_of_fakes import FakeDaemon, fake_daemon

playwright = pytest.importorskip("playwright.async_api", reason="the page's tests need playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
MODELS = {"smol": {"aliases": ["s"]}, "large": {"load": "on_demand"}}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("browser")
            item.add_marker(pytest.mark.asyncio(loop_scope="package"), append=False)
            if CHROMIUM is None:
                item.add_marker(pytest.mark.skip(reason="the page's tests need Chromium"))


@pytest_asyncio.fixture(loop_scope="package")
async def daemon(tmp_path: Path) -> AsyncIterator[FakeDaemon]:
    async with fake_daemon(tmp_path / "config.yaml", MODELS) as daemon:
        yield daemon


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def browser() -> AsyncIterator[Any]:
    async with playwright.async_playwright() as driver:
        running = await driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield running
        await running.close()


class Complaints(list[str]):
    """What the console says when something is wrong: refused by the policy, or thrown.

    That the server refused a request is no fault of the page.
    """

    def watch(self, page: Any) -> None:
        page.on("console", lambda message: message.type == "error" and self._hear(message.text))
        page.on("pageerror", lambda error: self._hear(str(error)))

    def _hear(self, text: str) -> None:
        if "the server responded with a status of" not in text:
            self.append(text)


@pytest_asyncio.fixture(loop_scope="package")
async def page(browser: Any, daemon: FakeDaemon) -> AsyncIterator[Any]:
    complaints = Complaints()
    context = await browser.new_context(viewport={"width": 1280, "height": 800})
    opened = await context.new_page()
    opened.set_default_timeout(20_000)
    complaints.watch(opened)
    await opened.goto(daemon.url)
    await opened.wait_for_selector(".card", state="attached")
    yield opened
    await context.close()
    assert complaints == []
