"""The encoder: tokens in, a hidden state for each out. Shapes: B texts, L tokens each, D the hidden size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from emlxd.graph.attention import Attention, Place, Scoring
from emlxd.graph.encoder_spec import EncoderSpec
from emlxd.graph.layers import Embedding, Linear, Mlp, Norm, Parallel
from emlxd.graph.rope import Rope, Rotate


@dataclass(frozen=True, slots=True)
class Texts:
    """The tokens of one step, int32 [B, L]: B rows with one or more texts side by side.

    ``owners`` says which of the step's T texts a token belongs to, T where there is padding; ``positions``
    where in its text it stands; ``seconds`` is 1 in the second text of a pair.
    """

    tokens: mx.array
    owners: mx.array
    positions: mx.array
    seconds: mx.array


class Body(Protocol):
    """What makes hidden states of texts: an encoder, or a decoder that writes nothing."""

    @property
    def shares_rows(self) -> bool:
        """Whether a row may have several texts."""

    def __call__(self, texts: Texts) -> mx.array:
        """[B, L, D]"""


@dataclass(frozen=True, slots=True)
class BidirectionalPlace(Place):
    """Whole texts, in which tokens see each other in both directions, but none of another text."""

    owners: mx.array = field(kw_only=True)

    def visible(self, back: int | None = None, size: int | None = None) -> mx.array:
        """bool [B, 1, L, L]: a token sees ``back`` tokens to either side, or all."""
        together = (self.owners[:, :, None] == self.owners[:, None])[:, None]
        if back is None or back >= self.length:
            return together
        place = mx.arange(self.length, dtype=mx.int32)
        return together & (mx.abs(place[:, None] - place) <= back)


@dataclass(frozen=True, slots=True)
class EncoderEmbeddings:
    """What a token is, where it is, and in which text of a pair."""

    tokens: Embedding
    positions: mx.array | None
    types: mx.array | None
    norm: Norm
    first_position: int

    def __call__(self, texts: Texts) -> mx.array:
        x = self.tokens(texts.tokens)
        if self.positions is not None:
            x = x + self.positions[self.first_position + texts.positions]
        if self.types is not None:
            x = x + mx.where(texts.seconds[..., None] == 1, self.types[-1], self.types[0])
        return self.norm(x)


@dataclass(frozen=True, slots=True)
class Seen:
    """What layers share that look equally far: the mask in the device's form, and what is added to scores.

    ``bias`` is [B, heads, L, L].
    """

    mask: mx.array
    bias: mx.array | None


@dataclass(frozen=True, slots=True)
class DistanceBias:
    """A number for each head and each of 32 ranges of distance, 16 to either side (T5, MPNet).

    The ranges have one distance each up to 8, then two to a doubling up to 128. ``table`` is [32, heads].
    """

    table: mx.array

    def __call__(self, batch: int, length: int) -> mx.array:
        """[B, heads, L, L]; the second L is the token that is seen."""
        place = mx.arange(length, dtype=mx.int32)
        ahead = place - place[:, None]
        far = mx.abs(ahead)
        doublings = sum((far * far >= 64 << half).astype(mx.int32) for half in range(1, 8))
        found = self.table[mx.where(ahead > 0, 16, 0) + mx.minimum(far, 8) + doublings].transpose(2, 0, 1)
        return mx.contiguous(mx.broadcast_to(found, (batch, *found.shape)))


@dataclass(frozen=True, slots=True)
class EncoderAttention:
    """``rope`` and ``window`` as in ``EncoderLayerSpec``."""

    qkv: Parallel
    out: Linear
    heads: int
    rope: Rope | None
    window: int | None

    def __call__(self, x: mx.array, seen: Seen, rotate: Rotate | None, attention: Attention) -> mx.array:
        batch, length, hidden = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3 * self.heads, -1)
        qk, v = mx.split(qkv, [2 * self.heads], axis=2)
        if rotate is not None:
            qk = rotate(qk)
        q, k, v = (part.swapaxes(1, 2) for part in (*mx.split(qk, 2, axis=2), v))
        out = attention(q, k, v, seen.mask, Scoring(q.shape[-1] ** -0.5), seen.bias)
        return self.out(out.swapaxes(1, 2).reshape(batch, length, hidden))


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One block, normalised before each of its two parts, or after the sum with what went into it."""

    attention: EncoderAttention
    attention_norm: Norm | None
    mlp: Mlp
    mlp_norm: Norm
    pre_norm: bool

    def __call__(self, x: mx.array, seen: Seen, rotate: Rotate | None, attention: Attention) -> mx.array:
        if self.pre_norm:
            h = x if self.attention_norm is None else self.attention_norm(x)
            x = x + self.attention(h, seen, rotate, attention)
            return x + self.mlp(self.mlp_norm(x))
        x = x + self.attention(x, seen, rotate, attention)
        x = x if self.attention_norm is None else self.attention_norm(x)
        return self.mlp_norm(x + self.mlp(x))


@dataclass(frozen=True, slots=True)
class Encoder:
    """An encoder ready to run."""

    spec: EncoderSpec
    embeddings: EncoderEmbeddings
    layers: tuple[EncoderLayer, ...]
    norm: Norm | None
    distances: DistanceBias | None
    attention_kind: Attention

    @property
    def shares_rows(self) -> bool:
        """Of rotary positions and of distances only differences count, which are the same in a row."""
        return True

    def __call__(self, texts: Texts) -> mx.array:
        """[B, L, D]; padding gets hidden states without a meaning."""
        batch, length = texts.tokens.shape
        starts = mx.zeros((batch,), mx.int32)
        place = BidirectionalPlace(slice(0, batch), starts, length, length, owners=texts.owners)
        seen: dict[int | None, Seen] = {}
        bias = self.distances(batch, length) if self.distances else None
        rotations: dict[int, Rotate] = {}
        x = self.embeddings(texts)
        for layer in self.layers:
            window, rope = layer.attention.window, layer.attention.rope
            if window not in seen:
                seen[window] = Seen(self.attention_kind.mask(place, window), bias)
            if rope is not None and id(rope) not in rotations:
                rotations[id(rope)] = rope.at(starts, length)
            x = layer(x, seen[window], rotations.get(id(rope)), self.attention_kind)
        return x if self.norm is None else self.norm(x)
