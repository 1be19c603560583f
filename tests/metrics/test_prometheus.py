"""A real Prometheus scrapes the daemon, and every query of the dashboard has an answer."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.daemon import free_port
from tests.metrics.house import house
from tests.metrics.test_documents import dashboard_queries

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed"),
]

CONFIG = """
global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}
scrape_configs:
  - job_name: emlxd
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


@contextlib.asynccontextmanager
async def prometheus(folder: Path, target: int) -> AsyncIterator[httpx.AsyncClient]:
    (folder / "prometheus.yml").write_text(CONFIG.format(port=target))
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) as http:
            yield http
    finally:
        process.terminate()
        await process.wait()


async def answered(http: httpx.AsyncClient, query: str) -> bool:
    query = query.replace("$model", ".*").replace("$__rate_interval", "10s")
    try:
        response = await http.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return False
    if response.status_code == 503:  # it is still starting
        return False
    found = response.json()
    assert found["status"] == "success", found
    return any(series["value"][1] != "NaN" for series in found["data"]["result"])


async def test_every_query_of_the_dashboard_has_data(tmp_path: Path) -> None:
    async with house() as daemon, prometheus(tmp_path, daemon.server.port) as http:
        (entry,) = daemon.registry.models
        assert entry.resident is not None
        gone = entry.resident.gone
        daemon.registry.unload(entry)
        await gone.wait()
        left = list(dashboard_queries())
        async with asyncio.timeout(60):
            while left:
                await daemon.complete(max_tokens=5)
                left = [(panel, query) for panel, query in left if not await answered(http, query)]
