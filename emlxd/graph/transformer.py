"""The decoder: tokens in, hidden states out, what the layers keep written on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from emlxd.graph.attention import Attention, Place
from emlxd.graph.delta import Chosen
from emlxd.graph.kv_cache import LayerArrays
from emlxd.graph.layer_inputs import InputGate, LayerInputs
from emlxd.graph.layers import Embedding, Linear, Norm, arrays_in
from emlxd.graph.moe import Moe, MoeBeside
from emlxd.graph.spec import ModelSpec
from emlxd.graph.step_context import Advance, StepContext


class Mixer(Protocol):
    """The part of a layer where tokens meet."""

    def __call__(self, x: mx.array, step: StepContext, kept: Sequence[mx.array]) -> mx.array:
        """[B, L, D] -> [B, L, D]. Writes this step into what the layer keeps."""


class FeedForward(Protocol):
    """The part of a layer that sees one token at a time."""

    def __call__(self, x: mx.array) -> mx.array:
        """[B, L, D] -> [B, L, D]"""


@dataclass(frozen=True, slots=True)
class Layer:
    """One block. Each norm is there or not, as ``ModelSpec.norm_places`` says."""

    mixer: Mixer
    feed_forward: FeedForward
    attention_in: Norm | None
    attention_out: Norm | None
    mlp_in: Norm | None
    mlp_out: Norm | None
    parallel: bool
    residual_scale: float
    input_gate: InputGate | None = None
    scale: mx.array | None = None

    def __call__(
        self, x: mx.array, step: StepContext, kept: Sequence[mx.array], own: mx.array | None = None
    ) -> mx.array:
        """``own`` [B, L, ...] is what ``LayerInputs`` has for this layer."""
        x = self._mixed(x, step, kept)
        if self.input_gate is not None and own is not None:
            x = self.input_gate(x, own)
        return x if self.scale is None else x * self.scale

    def _mixed(self, x: mx.array, step: StepContext, kept: Sequence[mx.array]) -> mx.array:
        h = _normed(self.attention_in, x)
        mixed = _normed(self.attention_out, self.mixer(h, step, kept))
        if self.parallel:
            return x + self._scaled(mixed + self.feed_forward(h))
        x = x + self._scaled(mixed)
        return x + self._scaled(_normed(self.mlp_out, self.feed_forward(_normed(self.mlp_in, x))))

    def _scaled(self, x: mx.array) -> mx.array:
        return x if self.residual_scale == 1.0 else x * self.residual_scale


def _normed(norm: Norm | None, x: mx.array) -> mx.array:
    return x if norm is None else norm(x)


@dataclass(frozen=True, slots=True)
class Transformer:
    """A decoder ready to run. Its weights are constants of whatever is compiled around it."""

    spec: ModelSpec
    dtype: mx.Dtype
    embedding: Embedding
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    attention: Attention
    adapters: Chosen
    by_layers: bool = False
    layer_inputs: LayerInputs | None = None

    def forward(
        self, tokens: mx.array, place: Place, kept: LayerArrays, later: list[Advance] | None = None
    ) -> mx.array:
        """tokens int32 [B, L] -> hidden states [B, L, D]. Writes this step into what the layers keep.

        With ``later`` recurrent states are not written yet, since it is not known how many of the tokens are
        right: for each state a function is put there, to be called with the ``lengths`` that hold.
        """
        for x, _ in self._run(tokens, place, kept, later):
            hidden = x
        return hidden

    def prefill(self, tokens: mx.array, place: Place, kept: LayerArrays) -> mx.array:
        """``forward`` for many tokens, not to be compiled: ``by_layers`` it is computed on the way.

        Then the host is one layer ahead of the device. If it is further ahead, what it has asked for in all
        these layers takes memory at once.
        """
        if not self.by_layers:
            return self.forward(tokens, place, kept)
        before = None
        for hidden, arrays in self._run(tokens, place, kept, None):
            mx.async_eval(hidden, *arrays)  # type: ignore[no-untyped-call]
            if before is not None:
                mx.eval(before)
            before = hidden
        return hidden

    def _run(
        self, tokens: mx.array, place: Place, kept: LayerArrays, later: list[Advance] | None
    ) -> Iterator[tuple[mx.array, Sequence[mx.array]]]:
        """What each layer gives, and keeps."""
        self.adapters.rows = place.adapters
        x = self.embedded(tokens)
        step = StepContext(self.spec, place, self.attention, later)
        inputs = self.layer_inputs(tokens, x) if self.layer_inputs else None
        for number, (layer, spec) in enumerate(zip(self.layers, self.spec.layers, strict=True)):
            arrays = kept[number if spec.source is None else spec.source]
            x = layer(x, step, arrays, None if inputs is None else inputs[:, :, number])
            yield x, arrays

    def embedded(self, tokens: mx.array) -> mx.array:
        """int32 [...] -> [..., D]"""
        x = self.embedding(tokens)
        return x if self.spec.embedding_scale == 1.0 else x * self.spec.embedding_scale

    def logits(self, hidden: mx.array) -> mx.array:
        """[..., D] -> float32 [..., vocab_size]"""
        return self.scaled(self.head(self.norm(hidden)))

    def scaled(self, logits: mx.array) -> mx.array:
        """What some families do to the head's output, in the model's dtype as mlx-lm does it -> float32"""
        scale, cap = self.spec.logit_scale, self.spec.logit_soft_cap
        if scale != 1.0 or cap:
            logits = logits.astype(self.dtype) * scale
            logits = cap * mx.tanh(logits / cap) if cap else logits
        return logits.astype(mx.float32)

    def arrays(self) -> list[mx.array]:
        """Every weight once, also when the head is the embedding."""
        return list({id(array): array for array in arrays_in(self)}.values())

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def bytes_read(self, rows: int) -> int:
        """Bytes of weights that a decode step of so many rows has to read.

        Not those of an embedding that is only looked up, nor of experts that no row chooses: one row reads
        the chosen ones, more rows as many as there are on average if each chooses at random.
        """
        projection = self.layer_inputs.projection if self.layer_inputs else ()
        parts = (self.layers, self.norm, self.head, projection)
        read = {id(array): array.nbytes for array in arrays_in(parts)}
        feeds = [layer.feed_forward for layer in self.layers]
        experts = [feed for feed in feeds if isinstance(feed, Moe | MoeBeside)]
        return sum(read.values()) - sum(moe.idle_bytes(rows) for moe in experts)
