"""The shipped embedding model, against vectors that sentence-transformers made."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from emlxd.config_file import load
from emlxd.graph.device import current_device
from emlxd.sources import locate
from emlxd.worker.gate import Gate
from emlxd.worker.make import make_worker
from emlxd.worker.pooling import EmbeddingWorker
from tests.agreement import TOLERANCES, close
from tests.minilm import DATA, SENTENCES

SHIPPED = Path(__file__).parents[2] / "config" / "config.yaml"

pytestmark = pytest.mark.model


@pytest.fixture
async def worker() -> AsyncIterator[EmbeddingWorker]:
    settings = next(model for model in load(SHIPPED, {}).models if model.name == "all-minilm-l6-v2")
    path = locate(settings.source)
    if path is None:
        pytest.skip("all-MiniLM-L6-v2 is not in the cache; `emlxd pull all-minilm-l6-v2` puts it there")
    worker = make_worker(settings, path, Gate())
    assert isinstance(worker, EmbeddingWorker)
    await worker.start()
    yield worker
    await worker.close()


async def test_vectors_are_those_of_sentence_transformers(worker: EmbeddingWorker) -> None:
    assert worker.info.max_context == 256
    texts = [await worker.encode(sentence) for sentence in SENTENCES]
    assert max(map(len, texts)) > 256
    made = np.array(await worker.embed([worker.tokenizer.truncate(text, 256) for text in texts]))
    expected = np.array(json.loads(DATA.read_text()))
    assert np.linalg.norm(made, axis=1) == pytest.approx(1.0, abs=1e-5)
    dtype = current_device().dtype("auto")
    cosines = (made * expected).sum(axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() >= 1 - max(1e-4, TOLERANCES[dtype] ** 2)
    assert close(made, expected, on_cpu=1e-4, dtype=dtype)
    assert made[0] @ made[1] > 0.5 > made[0] @ made[2]
