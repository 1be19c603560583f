"""Which worker a model needs."""

from __future__ import annotations

from pathlib import Path

from emlxd.config import ModelSettings
from emlxd.worker.gate import Gate
from emlxd.worker.load import load_model
from emlxd.worker.load_pooling import load_pooling
from emlxd.worker.pooling import EmbeddingWorker, RerankWorker
from emlxd.worker.worker import Worker, WorkerOptions

AnyWorker = Worker | EmbeddingWorker | RerankWorker


def make_worker(settings: ModelSettings, path: Path, gate: Gate) -> AnyWorker:
    """A worker, not started yet, for the model whose files are at ``path``."""
    from emlxd.graph.open_embedder import kind_of

    kind = kind_of(settings, path)
    if kind == "chat":
        return Worker(WorkerOptions.of(settings), lambda: load_model(settings, path, gate), gate)
    worker = EmbeddingWorker if kind == "embedding" else RerankWorker
    return worker(settings, lambda: load_pooling(settings, path, gate), gate)
