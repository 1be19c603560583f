"""A model with one of its adapters: a name of its own, on the model's worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from emlxd.core import GenerateRequest, ModelInfo, Shape
from emlxd.text.dialect import Wishes
from emlxd.text.tokenizer import Tokenizer
from emlxd.worker.mailbox import Generation
from emlxd.worker.make import AnyWorker
from emlxd.worker.worker import Worker


class AdaptedWorker:
    """Does what ``worker`` does, with its tokenizer and template; requests run with the adapter."""

    def __init__(self, worker: Worker, adapter: str) -> None:
        self.name = f"{worker.name}:{adapter}"
        self._worker = worker
        self._adapter = adapter

    @property
    def info(self) -> ModelInfo:
        return self._worker.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._worker.tokenizer

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return await self._worker.encode(text, add_special_tokens=add_special_tokens)

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> list[int]:
        return await self._worker.encode_chat(messages, **options)

    async def shape(self, prompt: Sequence[int], wishes: Wishes) -> Shape:
        return await self._worker.shape(prompt, wishes)

    def admit(self, answers: int) -> None:
        self._worker.admit(answers)

    def submit(self, request: GenerateRequest) -> Generation:
        return self._worker.submit(replace(request, adapter=self._adapter))


Served = AnyWorker | AdaptedWorker


def adapted(worker: AnyWorker, name: str) -> Served:
    """What serves ``name``: the worker, or the worker with an adapter if the name is ``model:adapter``."""
    model, _, adapter = name.rpartition(":")
    if isinstance(worker, Worker) and model == worker.name and adapter in worker.adapters:
        return AdaptedWorker(worker, adapter)
    return worker
