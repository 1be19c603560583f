"""Runs a model that reads whole texts: one compiled step for each shape of batch."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from emlxd.core import TokenizedText
from emlxd.graph.attention import Place
from emlxd.graph.device_memory import out_of_memory
from emlxd.graph.encoder import Body, Texts
from emlxd.graph.kv_cache import empty_layers
from emlxd.graph.layers import arrays_in
from emlxd.graph.pooling import Summary
from emlxd.graph.sentence_files import SentenceSpec
from emlxd.graph.transformer import Transformer


@dataclass(frozen=True, slots=True)
class DecoderBody:
    """A decoder that reads texts and writes nothing: what it caches lives for one step."""

    model: Transformer

    def __call__(self, texts: Texts) -> mx.array:
        """[B, L, D]. The padding is at the end, where no token of the text sees it."""
        batch, length = texts.tokens.shape
        place = Place(slice(0, batch), mx.zeros((batch,), mx.int32), length, length)
        kept = empty_layers(self.model.spec, batch, length, self.model.dtype)
        return self.model.norm(self.model.forward(texts.tokens, place, kept))


class MlxEmbedder:
    """Use it only on the thread that made it.

    ``sentence`` is what the model's files say of texts; ``max_context`` is how many tokens one may have.
    """

    def __init__(
        self,
        body: Body,
        summary: Summary,
        *,
        architecture: str,
        vocab_size: int,
        max_context: int,
        sentence: SentenceSpec,
        compile: bool,
    ) -> None:
        self.architecture = architecture
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.sentence = sentence
        self.traces = 0
        self._body = body
        self._summary = summary
        self._step = mx.compile(self._traced) if compile else self._traced

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for array in {id(a): a for a in arrays_in(self._body)}.values())

    def run(self, texts: Sequence[TokenizedText], rows: int, length: int) -> list[list[float]]:
        """What the model makes of each text, in a step of ``rows`` texts, padded to ``length`` tokens."""
        spare = rows - len(texts)
        tokens = [[*text.tokens, *[0] * (length - len(text.tokens))] for text in texts]
        made = self._step(
            mx.array([*tokens, *[[0] * length] * spare], dtype=mx.int32),
            mx.array([*(len(text.tokens) for text in texts), *[1] * spare], dtype=mx.int32),
            mx.array([*(text.second_at for text in texts), *[length] * spare], dtype=mx.int32),
        )
        return cast("list[list[float]]", made.tolist())[: len(texts)]

    def out_of_memory(self, error: Exception) -> bool:
        """Whether MLX raised ``error`` because the device's memory is full."""
        return out_of_memory(error)

    def close(self) -> None:
        """Frees the model. The thread's streams go too: MLX aborts if the process ends before they do."""
        mx.synchronize()
        del self._step, self._body, self._summary
        gc.collect()  # a compiled step refers to itself
        mx.clear_cache()
        mx.clear_streams()

    def _traced(self, tokens: mx.array, lengths: mx.array, seconds: mx.array) -> mx.array:
        self.traces += 1
        texts = Texts(tokens, lengths, seconds)
        return self._summary(self._body(texts), texts)
