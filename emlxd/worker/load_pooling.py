"""Makes a ``PoolingModel`` of a model's files. Called on the worker's own thread."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from emlxd.config import ModelSettings
from emlxd.core import ModelInfo, SamplingParams, TextBatch, TokenizedText
from emlxd.worker.load import freed_if_it_fails, read_tokenizer
from emlxd.worker.pooling import PoolingModel

WARM_UP: Final = TextBatch(((TokenizedText((0, 0), second_at=2),),), height=1, length=8)


def load_pooling(settings: ModelSettings, path: Path, turn: AbstractContextManager[None]) -> PoolingModel:
    """Loads the files at ``path`` onto the device, in ``turn`` with others. Raises ModelFormatError."""
    from emlxd.graph.open_embedder import open_embedder

    tokenizer = read_tokenizer(path)
    runner = open_embedder(path, settings, turn)
    with freed_if_it_fails(runner.close, turn), turn:
        runner.run([WARM_UP])  # compiles most of what a request needs
    return PoolingModel(
        info=ModelInfo(
            architecture=runner.architecture,
            max_context=runner.max_context,
            slots=1,
            vocab_size=runner.vocab_size,
            sampling=SamplingParams(),
        ),
        runner=runner,
        tokenizer=tokenizer,
        prompts=runner.sentence.prompts,
        default_prompt=runner.sentence.default_prompt,
    )
