"""Runs a pooling model, which reads whole texts: one compiled step for each shape of batch."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from emlxd.core import TextBatch
from emlxd.graph import blas
from emlxd.graph.attention import Place
from emlxd.graph.device import current_device
from emlxd.graph.device_memory import out_of_memory
from emlxd.graph.encoder import Body, Texts
from emlxd.graph.kv_cache import empty_layers
from emlxd.graph.layers import arrays_in
from emlxd.graph.pooling import States, Summary
from emlxd.graph.sentence_files import SentenceSpec
from emlxd.graph.transformer import Transformer


@dataclass(frozen=True, slots=True)
class DecoderBody:
    """A decoder that reads texts and writes nothing: what it caches lives for one step."""

    model: Transformer

    @property
    def shares_rows(self) -> bool:
        """Its layers may carry more from token to token than attention does."""
        return False

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
        self.shares_rows = body.shares_rows
        self.traces = 0
        self._body = body
        self._summary = summary
        self._step = mx.compile(self._traced) if compile else self._traced
        first = mx.default_stream(mx.default_device())
        self._streams = [first, *(mx.new_stream(first.device) for _ in range(current_device().lanes - 1))]

    @property
    def lanes(self) -> int:
        """How many batches run side by side."""
        return len(self._streams)

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for array in {id(a): a for a in arrays_in(self._body)}.values())

    def run(self, batches: Sequence[TextBatch]) -> list[list[list[float]]]:
        """What the model makes of each text, row by row, for each batch; at most ``lanes`` of them."""
        with blas.one_thread_each() if len(batches) > 1 else nullcontext():
            made = [self._begin(*pair) for pair in zip(batches, self._streams, strict=False)]
            mx.eval(made)  # together: MLX would begin the second only when the first is half done
            return [cast("list[list[float]]", vectors.tolist()) for vectors in made]

    def _begin(self, batch: TextBatch, stream: mx.Stream) -> mx.array:
        """float32 [T, n], not computed yet."""
        laid = lay_out(batch)
        with mx.stream(stream):
            texts = Texts(*(mx.array(part, dtype=mx.int32) for part in laid.tokens))
            hidden = self._step(texts.tokens, texts.owners, texts.positions, texts.seconds)
            states = States(
                hidden.reshape(-1, hidden.shape[-1]),
                texts.owners.flatten(),
                texts.positions.flatten(),
                mx.array(laid.first, dtype=mx.int32),
                mx.array(laid.last, dtype=mx.int32),
            )
            return self._summary(states)

    def out_of_memory(self, error: Exception) -> bool:
        """Whether MLX raised ``error`` because the device's memory is full."""
        return out_of_memory(error)

    def close(self) -> None:
        """Frees the model. The thread's streams go too: MLX aborts if the process ends before they do."""
        mx.synchronize()
        del self._step, self._body, self._summary, self._streams
        gc.collect()  # a compiled step refers to itself
        mx.clear_cache()
        mx.clear_streams()

    def _traced(self, tokens: mx.array, owners: mx.array, positions: mx.array, seconds: mx.array) -> mx.array:
        self.traces += 1
        return self._body(Texts(tokens, owners, positions, seconds))


@dataclass(frozen=True, slots=True)
class Layout:
    """``tokens`` are the four fields of ``Texts``, the rest is where each text begins and ends."""

    tokens: tuple[list[list[int]], ...]
    first: list[int]
    last: list[int]


def lay_out(batch: TextBatch) -> Layout:
    """The texts of ``batch`` as numbers of one shape."""
    count = sum(map(len, batch.rows))
    laid = Layout(([], [], [], []), [], [])
    for place in range(batch.height):
        texts = batch.rows[place] if place < len(batch.rows) else ()
        row: tuple[list[int], ...] = ([], [], [], [])
        tokens, owners, positions, seconds = row
        for text in texts:
            length = len(text.tokens)
            owners += [len(laid.first)] * length
            laid.first.append(place * batch.length + len(tokens))
            tokens += text.tokens
            positions += range(length)
            seconds += (int(at >= text.second_at) for at in range(length))
            laid.last.append(laid.first[-1] + length - 1)
        spare = batch.length - len(tokens)
        for part, made, padding in zip(laid.tokens, row, (0, count, 0, 0), strict=True):
            part.append([*made, *[padding] * spare])
    return laid
