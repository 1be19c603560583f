"""From a text's hidden states to one vector or one score. Shapes: T texts, N tokens, D the hidden size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

import mlx.core as mx

from emlxd.errors import ModelFormatError
from emlxd.graph.activations import ACTIVATIONS
from emlxd.graph.encoder_spec import EncoderSpec
from emlxd.graph.layers import Linear, Norm
from emlxd.graph.safetensors import open_safetensors
from emlxd.graph.sentence_files import DenseSpec, PoolingMode, SentenceSpec
from emlxd.graph.taker import Taker
from emlxd.graph.weights import Weight


class Summary(Protocol):
    """What is made of a text's hidden states."""

    def __call__(self, states: States) -> mx.array:
        """float32 [T, n]"""


@dataclass(frozen=True, slots=True)
class States:
    """The hidden states of T texts: ``hidden`` [N, D] of all tokens of a step, padding among them.

    ``owners`` and ``positions`` int32 [N] as in ``Texts``; ``first`` and ``last`` int32 [T] are where each
    text's first and last token are.
    """

    hidden: mx.array
    owners: mx.array
    positions: mx.array
    first: mx.array
    last: mx.array


def pool(mode: PoolingMode, states: States) -> mx.array:
    """[T, D]"""
    hidden = states.hidden
    if mode == "cls":
        return hidden[states.first]
    if mode == "lasttoken":
        return hidden[states.last]
    count = states.first.shape[0]
    if mode == "max":
        lowest = mx.full((count + 1, hidden.shape[1]), -mx.inf, dtype=hidden.dtype)
        return lowest.at[states.owners].maximum(hidden)[:count]
    weights = states.positions + 1 if mode == "weightedmean" else mx.ones_like(states.positions)
    weights = weights[:, None].astype(hidden.dtype)
    # One row more, for the padding.
    total = mx.zeros((count + 1, hidden.shape[1]), hidden.dtype).at[states.owners].add(hidden * weights)
    weight = mx.zeros((count + 1, 1), hidden.dtype).at[states.owners].add(weights)[:count]
    return total[:count] / (mx.sqrt(weight) if mode == "mean_sqrt_len_tokens" else weight)


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer and what follows it."""

    linear: Linear
    activation: str

    def __call__(self, x: mx.array) -> mx.array:
        return ACTIVATION[self.activation](self.linear(x))


@dataclass(frozen=True, slots=True)
class SentenceVector:
    """One vector for a text, as ``SentenceSpec`` says."""

    pooling: tuple[PoolingMode, ...]
    dense: tuple[Dense, ...]
    normalize: bool

    def __call__(self, states: States) -> mx.array:
        states = replace(states, hidden=states.hidden.astype(mx.float32))
        x = mx.concatenate([pool(mode, states) for mode in self.pooling], axis=-1)
        for dense in self.dense:
            x = dense(x)
        if self.normalize:
            x = x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
        return x


@dataclass(frozen=True, slots=True)
class PairScore:
    """How well the two texts of a pair go together, from 0 to 1: float32 [T, 1]."""

    dense: Dense
    norm: Norm | None
    out: Linear
    mean: bool

    def __call__(self, states: States) -> mx.array:
        x = self.dense(pool("mean" if self.mean else "cls", states))
        if self.norm is not None:
            x = self.norm(x)
        return mx.sigmoid(self.out(x).astype(mx.float32))


ACTIVATION: Final[Mapping[str, Callable[[mx.array], mx.array]]] = {
    **ACTIVATIONS,
    "tanh": mx.tanh,
    "relu": lambda x: mx.maximum(x, 0),
    "identity": lambda x: x,
}


def load_sentence_vector(spec: SentenceSpec) -> SentenceVector:
    """Raises ModelFormatError if a dense layer's tensors are not what its config says."""
    return SentenceVector(spec.pooling, tuple(_load_dense(dense) for dense in spec.dense), spec.normalize)


def load_pair_score(take: Taker, spec: EncoderSpec, base: str) -> PairScore:
    """The head of a cross-encoder."""
    head, hidden = spec.head, spec.hidden_size
    return PairScore(
        dense=Dense(
            take.linear(head.dense.format(base=base), hidden, hidden, head.dense_bias), head.activation
        ),
        norm=take.norm(head.norm, spec.norm, hidden) if head.norm else None,
        out=take.linear(head.out, 1, hidden, bias=True),
        mean=head.mean,
    )


def _load_dense(spec: DenseSpec) -> Dense:
    file = spec.folder / "model.safetensors"
    if spec.activation not in ACTIVATION:
        raise ModelFormatError(
            f"{spec.folder}: the activation '{spec.activation}', supported are {', '.join(ACTIVATION)}"
        )
    tensors = open_safetensors(file)
    wanted = {"linear.weight": (spec.outputs, spec.inputs)} | (
        {"linear.bias": (spec.outputs,)} if spec.bias else {}
    )
    if {name: tensor.shape for name, tensor in tensors.items()} != wanted:
        raise ModelFormatError(f"{file}: expected the tensors {wanted}")
    tensors = {name: tensor.astype(mx.float32) for name, tensor in tensors.items()}
    mx.eval(tensors)
    return Dense(Linear(Weight(tensors["linear.weight"]), tensors.get("linear.bias")), spec.activation)
