"""From a model's files to the worker that they need, and through it to what it is for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emlxd import footprint
from emlxd.config import ModelSettings, Source
from emlxd.worker.gate import Gate
from emlxd.worker.make import make_worker
from emlxd.worker.pooling import EmbeddingWorker, RerankWorker
from emlxd.worker.worker import Worker
from tests.graph.tiny import make_llama, save
from tests.graph.tiny_encoders import DATA, write_encoder
from tests.wordpiece import write_wordpiece

REFERENCES: dict[str, Any] = json.loads(DATA.read_text())


def settings(folder: Path) -> ModelSettings:
    return ModelSettings(name="tiny", source=Source(path=folder), compile=False)


def encoder(folder: Path, task: str) -> Path:
    found = REFERENCES["bert"][task]
    return write_wordpiece(write_encoder(folder, found["config"], found["shapes"]))


async def test_an_encoder_embeds(tmp_path: Path) -> None:
    folder = encoder(tmp_path, "embedding")
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "q "}}')
    (folder / "modules.json").write_text(
        '[{"type": "Transformer"}, {"type": "x.Pooling", "path": "1_Pooling"}, {"type": "x.Normalize"}]'
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    worker = make_worker(settings(folder), folder, Gate())
    assert isinstance(worker, EmbeddingWorker)
    await worker.start()
    assert (worker.info.architecture, worker.info.max_context) == ("bert", 64)
    prompts = [await worker.encode(text) for text in ("a b c", "x y", "a b c")]
    one, other, same = await worker.embed(prompts)
    assert sum(value**2 for value in one) == pytest.approx(1.0)
    assert one == pytest.approx(same, abs=1e-6)
    assert one != pytest.approx(other, abs=1e-2)
    assert worker.prompt("query") == "q "
    stats = worker.stats()
    assert stats is not None and stats.counts.traces >= 1
    assert 0 < stats.memory["weights"] <= footprint.predict(settings(folder), folder).weights
    await worker.close()


async def test_a_cross_encoder_scores(tmp_path: Path) -> None:
    folder = encoder(tmp_path, "rerank")
    worker = make_worker(settings(folder), folder, Gate())
    assert isinstance(worker, RerankWorker)
    await worker.start()
    scores = await worker.score([await worker.encode_pair("a b", text) for text in ("c", "d e f", "c")])
    assert all(0 < score < 1 for score in scores)
    assert scores[0] == pytest.approx(scores[2], abs=1e-6) != scores[1]
    await worker.close()


async def test_a_decoder_writes(tmp_path: Path) -> None:
    save(tmp_path, *make_llama())
    worker = make_worker(settings(tmp_path), tmp_path, Gate())
    assert isinstance(worker, Worker)
    with_vectors = settings(tmp_path).model_copy(update={"kind": "embedding"})
    assert isinstance(make_worker(with_vectors, tmp_path, Gate()), EmbeddingWorker)
