"""Opens a pooling model, which reads whole texts: an encoder or a decoder that embeds, or a cross-encoder."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

from emlxd.config import ModelSettings
from emlxd.core import Kind
from emlxd.errors import ModelFormatError
from emlxd.graph.checkpoint import Checkpoint, open_checkpoint
from emlxd.graph.context_length import context_of
from emlxd.graph.device import Device, current_device
from emlxd.graph.embedder import DecoderBody, MlxEmbedder
from emlxd.graph.encoder_families import ENCODERS, encoder_spec_of
from emlxd.graph.encoder_loader import base_of, load_encoder
from emlxd.graph.family import Family
from emlxd.graph.folder import FolderCheckpoint
from emlxd.graph.loader import load_transformer
from emlxd.graph.open import quantization_of
from emlxd.graph.pooling import load_pair_score, load_sentence_vector
from emlxd.graph.sentence_files import is_sentence_model, read_sentence_spec
from emlxd.graph.taker import Taker
from emlxd.json_files import read_object

# Heads for other tasks, and tables that are computed anew.
_UNUSED: Final = ("position_ids", "pooler.", "cls.", "lm_head.", "head.", "decoder.", "classifier", "vocab_")


def kind_of(settings: ModelSettings, path: Path) -> Kind:
    """What the model is for. Raises ModelFormatError if it has adapters and is not for chat."""
    kind = _kind_of(settings, path)
    if settings.adapters and kind != "chat":
        raise ModelFormatError(f"{path}: is for {kind}, expected a chat model where adapters are given")
    return kind


def _kind_of(settings: ModelSettings, path: Path) -> Kind:
    """What its entry says, or what its files are written for."""
    if settings.kind != "auto":
        return settings.kind
    config = config_or_empty(path)
    if config.get("model_type") in ENCODERS:
        tasks = config.get("architectures") or ()
        return "rerank" if any("ForSequenceClassification" in str(task) for task in tasks) else "embedding"
    return "embedding" if is_sentence_model(path) else "chat"


def open_embedder(
    path: Path, settings: ModelSettings, turn: AbstractContextManager[None] | None = None
) -> MlxEmbedder:
    """Loads the model in this thread, which must be the one that runs it, in ``turn`` with others.

    Raises ModelFormatError.
    """
    device, turn = current_device(), turn or nullcontext()
    if config_or_empty(path).get("model_type") in ENCODERS:
        return _open_encoder(path, settings, device, turn)
    if settings.kind == "rerank":
        raise ModelFormatError(
            f"{path}: is no cross-encoder, expected a head for scores on one of {', '.join(sorted(ENCODERS))}"
        )
    return _open_decoder(path, settings, device, turn)


def _open_encoder(
    path: Path, settings: ModelSettings, device: Device, turn: AbstractContextManager[None]
) -> MlxEmbedder:
    scores = kind_of(settings, path) == "rerank"
    checkpoint = FolderCheckpoint(path, Family("encoder", ignored=_UNUSED))
    spec = encoder_spec_of(checkpoint.config, str(path))
    sentence = read_sentence_spec(path, "mean")
    max_context = context_of(settings, path, spec.max_position, sentence.max_tokens)
    take = Taker(
        checkpoint,
        device.dtype(settings.dtype),
        keep_quantized=device.keeps_quantized("keep" if settings.quantize else settings.weights),
        requantize=quantization_of(settings),
    )
    if scores:
        _check_labels(path, checkpoint.config)
    base = base_of(checkpoint, spec)
    body = load_encoder(
        take, spec, device, base, max_context=max_context, compile=settings.compile, turn=turn
    )
    with turn:
        summary = load_pair_score(take, spec, base) if scores else load_sentence_vector(sentence)
    take.finish()
    return MlxEmbedder(
        body,
        summary,
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        max_context=max_context,
        sentence=sentence,
        compile=settings.compile,
    )


def _open_decoder(
    path: Path, settings: ModelSettings, device: Device, turn: AbstractContextManager[None]
) -> MlxEmbedder:
    checkpoint = _headless(path)
    sentence = read_sentence_spec(path, "lasttoken")
    limit = int(checkpoint.config.get("max_position_embeddings") or 2048)
    max_context = context_of(settings, path, limit, sentence.max_tokens)
    model = load_transformer(
        checkpoint,
        device,
        max_context=max_context,
        dtype=settings.dtype,
        weights=settings.weights,
        quantize=quantization_of(settings),
        compile=settings.compile,
        turn=turn,
    )
    return MlxEmbedder(
        DecoderBody(model),
        load_sentence_vector(sentence),
        architecture=model.spec.architecture,
        vocab_size=model.spec.vocab_size,
        max_context=max_context,
        sentence=sentence,
        compile=settings.compile,
    )


def _headless(path: Path) -> Checkpoint:
    """A decoder's files; those of an embedding model may lack the head, which is not used."""
    if not path.is_dir():
        return open_checkpoint(path)
    checkpoint = FolderCheckpoint(path)
    checkpoint.config = {**checkpoint.config, "tie_word_embeddings": True}
    return checkpoint


def _check_labels(path: Path, config: Mapping[str, Any]) -> None:
    labels = int(config.get("num_labels") or len(config.get("id2label") or ()) or 2)
    if labels != 1:
        raise ModelFormatError(
            f"{path}: tells {labels} labels apart, expected a cross-encoder, which has one"
        )


def config_or_empty(path: Path) -> Mapping[str, Any]:
    """config.json, or nothing where it cannot be read: whoever opens the model says what is wrong with it."""
    try:
        return read_object(path / "config.json")
    except ModelFormatError:
        return {}
