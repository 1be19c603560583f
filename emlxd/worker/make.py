"""Which worker a model needs."""

from __future__ import annotations

from pathlib import Path

from emlxd.config import ModelSettings
from emlxd.worker.gate import Gate
from emlxd.worker.load import load_model
from emlxd.worker.load_reader import load_reader
from emlxd.worker.reader import EmbeddingWorker, RerankWorker
from emlxd.worker.worker import Worker, WorkerOptions

AnyWorker = Worker | EmbeddingWorker | RerankWorker


def make_worker(settings: ModelSettings, path: Path, gate: Gate) -> AnyWorker:
    """A worker, not started yet, for the model whose files are at ``path``."""
    from emlxd.graph.open_embedder import kind_of

    kind = kind_of(settings, path)
    if kind == "chat":
        return Worker(WorkerOptions.of(settings), lambda: load_model(settings, path, gate), gate)
    reader = EmbeddingWorker if kind == "embedding" else RerankWorker
    return reader(settings, lambda: load_reader(settings, path, gate), gate)
