"""A model whose steps a test holds back, and what is asked of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from emlxd.core import GenerateRequest, ModelInfo, SamplingParams
from emlxd.text.chat_template import ChatTemplate
from emlxd.worker.load import Model
from emlxd.worker.mailbox import Generation
from tests.worker.fakes import LETTERS, FakeRunner, letters_tokenizer


class GatedRunner(FakeRunner):
    """A runner whose steps finish when the test says so."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots, lambda tokens: len(tokens) % 26)
        self.steps = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.threads: set[str] = set()

    def forward(self, positions: Sequence[int | None]) -> None:
        self.begun.release()
        self.threads.add(threading.current_thread().name)
        assert self.steps.acquire(timeout=20)
        super().forward(positions)


def fake_model(runner: GatedRunner, template: str | None = None) -> Model:
    return Model(
        ModelInfo("fake", 4096, 2, len(LETTERS), SamplingParams()),
        runner,
        letters_tokenizer(),
        ChatTemplate(template, {}) if template else None,
    )


def request(id: str = "r", max_tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(id, (0, 1, 2), max_tokens, chunking="token")


async def begun(runner: GatedRunner) -> None:
    """Waits until the worker has begun its next forward pass."""
    assert await asyncio.to_thread(runner.begun.acquire, timeout=20)


async def read(generation: Generation) -> list[object]:
    return [event async for event in generation]
