"""What the files of a pooling model say of its size, read from their headers alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from emlxd.graph.encoder_families import ENCODERS, encoder_spec_of
from emlxd.graph.measure import ModelFacts, measure, tensors_of_folder
from emlxd.graph.open_embedder import config_or_empty
from emlxd.graph.sentence_files import read_sentence_spec
from emlxd.graph.weights import Quantization


def measure_pooling(path: Path, quantize: Quantization | None = None) -> ModelFacts:
    """An encoder, or a decoder without its logits. Raises ModelFormatError."""
    config = config_or_empty(path)
    if config.get("model_type") in ENCODERS:
        spec = encoder_spec_of(config, str(path))
        facts = ModelFacts(
            tensors=tuple(tensors_of_folder(path, config, quantize)),
            cached_values=0,
            widest_row=5 * spec.hidden_size + (2 if spec.gated else 1) * spec.intermediate_size,
            heads=spec.heads,
            vocab_size=0,
            max_position=spec.max_position,
        )
    else:
        facts = replace(measure(path, quantize), vocab_size=0)
    return replace(facts, usual_context=read_sentence_spec(path, "mean").max_tokens)
