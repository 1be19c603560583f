"""Which worker a model needs, and what one that reads whole texts runs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from emlxd.config import ModelSettings
from emlxd.core import Kind, ModelInfo, SamplingParams
from emlxd.worker.load import read_tokenizer
from emlxd.worker.reader import ReaderModel


def kind_of(settings: ModelSettings, path: Path) -> Kind:
    """What the model is for: what its entry says, or what its files are written for."""
    from emlxd.graph.open_embedder import kind_of

    return kind_of(settings, path)


def load_reader(settings: ModelSettings, path: Path, turn: AbstractContextManager[None]) -> ReaderModel:
    """Loads a model that reads whole texts, in ``turn`` with others, on its worker's thread.

    Raises ModelFormatError.
    """
    from emlxd.graph.open_embedder import open_embedder

    tokenizer = read_tokenizer(path)
    runner = open_embedder(path, settings, turn)
    return ReaderModel(
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
