"""The README's picture: EMLXD_SCREENSHOTS=docs makes it anew."""

from __future__ import annotations

import asyncio
import os
import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import expect

from emlxd.config import ModelSettings
from emlxd.core import Distribution, WorkerCounts, WorkerStats
from emlxd.memory import Needs
from emlxd.worker.mailbox import Generation
from tests.daemon_of_fakes import HouseWorker, fake_daemon
from tests.residents import House

GIB = 1024**3
PACE = 0.015  # seconds a word, as a model of that size has it
SIZES = {"qwen3-8b": 9.4, "smollm2-135m": 1.8, "llama-3.2-3b": 4.1}
ANSWER = """A **KV cache** keeps the keys and values of the tokens that were read, \
so a new token costs *one* row of attention instead of the whole prompt again.

1. The prompt is read once: `K` and `V` of each token are written.
2. Each step writes one row, and reads all rows before it.

```python
def step(token, cache, position):
    q, k, v = project(token)
    cache.keys[position] = k
    cache.values[position] = v
    return attend(q, cache.keys[: position + 1], cache.values[: position + 1])
```

| model | layers | bytes a token |
|---|---|---|
| SmolLM2 135M | 30 | 45 KiB |
| Qwen3 8B | 36 | 144 KiB |
"""


@pytest_asyncio.fixture(loop_scope="package")
async def page(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A daemon of some size that is at work."""
    ticks = count()

    async def prepare(house: House, settings: ModelSettings) -> Needs:
        return Needs(weights=round(SIZES[settings.name] * GIB))

    def stats(worker: HouseWorker) -> WorkerStats:
        tick = next(ticks)
        tokens = 60 * tick + 12 * (tick % 4) if worker.name == "qwen3-8b" else 0
        none = Distribution((), (0,), 0.0)
        counts = WorkerCounts(0, 0, 0, none, none, Distribution((), (tokens,), 0.0))
        return WorkerStats(5 if tokens else 0, 0, 8, 0, 0, {}, counts)

    async def answer(worker: HouseWorker, generation: Generation) -> None:
        for event in worker._events(generation.request):
            await asyncio.sleep(PACE)
            generation.deliver([event])

    monkeypatch.setattr(House, "prepare", prepare)
    monkeypatch.setattr(HouseWorker, "_answer", answer)
    monkeypatch.setattr(HouseWorker, "stats", stats)
    models = {"qwen3-8b": {"aliases": ["chat"]}, "smollm2-135m": {}, "llama-3.2-3b": {"load": "on_demand"}}
    async with fake_daemon(tmp_path / "config.yaml", models, budget=24 * GIB) as daemon:
        resident: Any = daemon.registry.find("qwen3-8b").usable
        resident.worker.words = re.findall(r"\s*\S+|\s+$", ANSWER)
        context = await browser.new_context(viewport={"width": 1280, "height": 800})
        opened = await context.new_page()
        await opened.clock.install()
        await opened.goto(daemon.url)
        yield opened
        await context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_picture(page: Any, tmp_path: Path, scheme: str) -> None:
    await page.emulate_media(color_scheme=scheme)
    for _ in range(40):
        await page.clock.run_for(1000)
    await page.fill("#prompt", "How does a KV cache work?")
    await page.press("#prompt", "Enter")
    await expect(page.locator(".turn.answer .foot")).to_contain_text("tokens")
    await expect(page.locator(".card").nth(0)).to_contain_text("5 of 8 slots in use")
    folder = Path(os.environ.get("EMLXD_SCREENSHOTS", tmp_path))
    picture = await page.screenshot(path=folder / ("page.png" if scheme == "light" else "page-dark.png"))
    assert len(picture) < 200_000
