"""What a model's files say it is: for lists of models, and for those who choose one."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from emlxd.config import ModelSettings, Source
from emlxd.core import ModelCard
from emlxd.errors import ModelFormatError
from emlxd.graph.context_length import context_of
from emlxd.graph.gguf import GgufFile
from emlxd.graph.measure import StoredTensor, measure
from emlxd.graph.measure_pooling import measure_pooling
from emlxd.graph.open_embedder import config_or_empty, kind_of
from emlxd.sources import locate_model
from emlxd.text import gguf_vocabulary, hf_vocabulary
from emlxd.text.dialect import thinks


def describe_all(models: Iterable[ModelSettings]) -> dict[str, ModelCard]:
    """The cards of those whose files are on this machine and can be read, by name."""
    cards: dict[str, ModelCard] = {}
    for settings in models:
        with suppress(ModelFormatError, OSError):  # loading it will say what is wrong
            if card := describe(settings):
                cards[settings.name] = card
    return cards


def describe(settings: ModelSettings) -> ModelCard | None:
    """The model's card, None if its files are not on this machine. Raises ModelFormatError.

    Reads headers alone.
    """
    found = locate_model(settings)
    if found is None:
        return None
    path = found[1]
    kind = kind_of(settings, path)
    facts = measure(path) if kind == "chat" else measure_pooling(path)
    if path.is_dir():
        architecture = str(config_or_empty(path).get("model_type", ""))
        templates = hf_vocabulary.chat_templates(path)
    else:
        metadata = GgufFile(path).metadata
        architecture = str(metadata.get("general.architecture", ""))
        templates = gguf_vocabulary.chat_templates(metadata)
    template = templates.get("default", "")
    files = _files(path)
    return ModelCard(
        kind=kind,
        format="safetensors" if path.is_dir() else "gguf",
        architecture=architecture,
        nbytes=sum(file.stat().st_size for file in files),
        digest=_digest(settings.source, files),
        modified=max(file.stat().st_mtime for file in files),
        parameters=sum(tensor.values for tensor in facts.tensors),
        quantization=_commonest(facts.tensors),
        max_context=context_of(settings, path, facts.max_position, facts.usual_context),
        template=template,
        thinks=thinks(template),
    )


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _digest(source: Source, files: Iterable[Path]) -> str:
    """The SHA-256 in the configuration, or else that of the files' names, sizes and times.

    To read the files themselves would take too long for a list of models.
    """
    if source.sha256:
        return source.sha256.lower()
    known = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(known).encode()).hexdigest()


def _commonest(tensors: Iterable[StoredTensor]) -> str:
    forms: Counter[str] = Counter()
    for tensor in tensors:
        forms[tensor.form] += tensor.values
    return forms.most_common(1)[0][0]
