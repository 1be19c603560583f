"""What an architecture is, as data. The decoder in ``transformer.py`` is built from a ``ModelSpec``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from emlxd.graph.batch import BLOCK_TOKENS
from emlxd.graph.recurrent_spec import Kept, RecurrentSpec


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions over a head's first ``dims``; ``scaling`` is ``rope_scaling`` of config.json.

    ``traditional`` rotates neighbours, dimensions 2i and 2i + 1; otherwise i and i + dims / 2.
    ``max_position`` is what the model was stretched to.
    """

    dims: int
    base: float
    scaling: Mapping[str, Any] | None = None
    traditional: bool = False
    max_position: int = 0


@dataclass(frozen=True, slots=True)
class NormSpec:
    """``rms`` or ``layer`` normalisation; with ``plus_one`` the stored weight w stands for 1 + w.

    ``published``: only in files as they were published, not in those that mlx-lm has converted.
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False
    plus_one: bool | Literal["published"] = False


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention: keys and values are expanded from one small vector a token.

    The sizes of that vector, of the part of a head that is not rotated, of the rotated part, and of a head's
    values; ``query_rank`` is the size that queries are squeezed through, if they are. ``eps``: of the norms
    of both narrow layers.
    """

    rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None
    eps: float


Scores = Literal["softmax", "sigmoid", "softmax_chosen", "sparsemixer"]


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts: each token goes to ``chosen`` of ``count``, each ``width`` wide.

    ``scores``: how the router's logits become weights. ``softmax`` and ``sigmoid`` over all experts,
    ``softmax_chosen`` over the chosen ones alone, ``sparsemixer`` as Phi-MoE. ``normalize`` lets the chosen
    weights sum to 1, ``scale`` multiplies them. ``correction`` adds a stored bias when choosing, not when
    weighing; None: if the checkpoint has one. With ``groups`` only the experts of the best ``top_groups`` may
    be chosen, a group being as good as its best expert or its best two (``group_score``). ``shared_width`` is
    that of the expert which sees every token; ``shared_gate`` weighs it. ``interleaved``: rows of the gate
    and the linear part alternate where a checkpoint stores them as one. ``beside``: they are added to a plain
    feed-forward layer, each with norms of its own, as in Gemma 4.
    """

    count: int
    chosen: int
    width: int
    scores: Scores
    normalize: bool = False
    scale: float = 1.0
    correction: bool | None = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best_two"] = "best"
    shared_width: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False
    interleaved: bool = False
    jitter: float = 0.0
    beside: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer. ``rope`` may be None; ``window`` is how far back it sees.

    ``recurrent`` stands in the place of attention. A layer with a ``ring`` keeps only so many of the last
    positions, position p at place p modulo ``ring``, and has one more place that nobody reads. ``width`` is
    that of its plain feed-forward layer.

    ``values_are_keys``: values are what keys are before they are normalised. A layer with a ``source`` has
    neither of its own: it looks at those of the layer with this number, which has the same window and heads.
    """

    rope: RopeSpec | None
    window: int | None = None
    experts: ExpertsSpec | None = None
    recurrent: RecurrentSpec | None = None
    ring: int | None = None
    head_dim: int = 0  # the model's, as are the next two
    kv_heads: int = 0
    width: int = 0
    values_are_keys: bool = False
    source: int | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder: its sizes and which of the optional parts it has.

    ``norm_places``: where a layer normalises, before (``in``) or after (``out``) attention and feed-forward;
    ``parallel`` gives both the same input. ``qk_norm``: over each head of the queries and keys, or over all
    of them. ``attention_gate``: each head's output is weighed by what the query projection also makes.
    ``tied_head`` None: tied if the checkpoint has no head. ``position_scale`` (beta, n) multiplies
    the query at position p by 1 + beta log(1 + floor(p / n)). ``value_norm``: each head of the values is
    normalised too, without a weight. ``layer_scale``: a number multiplies what a layer gives.
    ``layer_inputs``: the size of what every layer is given of the token itself, by a table of
    ``layer_vocab_size`` rows.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    heads: int
    kv_heads: int
    head_dim: int
    norm: NormSpec
    max_position: int
    attention_scale: float
    tied_head: bool | None = None
    norm_places: tuple[str, ...] = ("attention_in", "mlp_in")
    parallel: bool = False
    qk_norm: Literal["head", "each_head", "all_heads"] | None = None
    qk_norm_spec: NormSpec | None = None
    attention_gate: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    activation: str = "silu"
    gated: bool = True
    sinks: bool = False
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    position_scale: tuple[float, int] | None = None
    latent: LatentSpec | None = None
    value_norm: bool = False
    layer_scale: bool = False
    layer_inputs: int = 0
    layer_vocab_size: int = 0

    def kept(self, layer: LayerSpec, max_context: int) -> tuple[Kept, ...]:
        """What a layer keeps for a slot: keys and values, latents, or states."""
        if layer.recurrent:
            return layer.recurrent.states
        if layer.source is not None:
            return ()
        if latent := self.latent:
            return Kept((1, max_context, latent.rank)), Kept((1, max_context, latent.rope_dim))
        positions = layer.ring + 1 if layer.ring else max_context
        tokens = Kept((layer.kv_heads, positions, layer.head_dim), ring=layer.ring)
        return tokens, tokens

    def with_rings(self, max_context: int, step_tokens: int) -> ModelSpec:
        """The same with rings for layers that have a window, where that is less than the whole context."""
        if self.latent:
            return self
        layers = [
            replace(layer, ring=ring_size(layer.window, max_context, step_tokens)) if layer.window else layer
            for layer in self.layers
        ]
        return replace(self, layers=tuple(layers))


def ring_size(window: int, max_context: int, step_tokens: int) -> int | None:
    """The ring of a layer that sees ``window`` positions; None if it has to keep the whole context.

    A step writes up to ``step_tokens`` before it reads, some of which may be drafts that prove wrong. They
    may overwrite neither the window nor the block of the prefix cache that they complete. The ring is a whole
    number of such blocks.
    """
    needed = step_tokens + max(window, BLOCK_TOKENS) - 1
    ring = -(-needed // BLOCK_TOKENS) * BLOCK_TOKENS
    return ring if ring + 1 < max_context else None
