"""What an encoder is, as data. The model in ``encoder.py`` is built from an ``EncoderSpec``."""

from __future__ import annotations

from dataclasses import dataclass

from emlxd.graph.spec import NormSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """What the checkpoints of a family call their tensors; ``base`` comes before all of them but the head's.

    ``layer`` comes before the names within a layer and has the place for its number. Attention's projections
    and those of the feed-forward layer are listed as they are stored, one by one or fused.
    """

    base: tuple[str, ...]
    tokens: str
    positions: str
    types: str
    embedding_norm: str
    layer: str
    qkv: tuple[str, ...]
    out: str
    attention_norm: str
    up: tuple[str, ...]
    down: str
    mlp_norm: str
    final_norm: str = ""
    distances: str = ""


@dataclass(frozen=True, slots=True)
class ScoreHeadSpec:
    """What a cross-encoder makes its score with, from the first token's vector or from the mean of all.

    ``dense`` and ``out`` are linear layers, ``activation`` and a norm are between them.
    """

    dense: str
    activation: str
    out: str
    norm: str = ""
    dense_bias: bool = True
    mean: bool = False


@dataclass(frozen=True, slots=True)
class EncoderLayerSpec:
    """``window``: how far a token sees to either side, None for everything."""

    rope: RopeSpec | None = None
    window: int | None = None
    attention_norm: bool = True


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """A transformer in which every token sees every other, before it and after it.

    ``positions`` are the rows of the table of positions, none with rotary ones; a text's first token is at
    ``first_position``. ``token_types`` are the rows of the table that tells a pair's two texts apart.
    ``distances``: scores get what a table has for how far apart two tokens are.
    ``pre_norm`` normalises the input of attention and feed-forward, otherwise the sum after them.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    layers: tuple[EncoderLayerSpec, ...]
    norm: NormSpec
    max_position: int
    names: EncoderNames
    head: ScoreHeadSpec
    activation: str = "gelu"
    gated: bool = False
    positions: int = 0
    first_position: int = 0
    token_types: int = 0
    distances: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    pre_norm: bool = False
