"""What an architecture is, as data. The decoder in ``transformer.py`` is built from a ``ModelSpec``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions over a head's first ``dims``; ``scaling`` is ``rope_scaling`` of config.json."""

    dims: int
    base: float
    scaling: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder: its sizes and which of the optional parts it has."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    max_position: int
    tied_head: bool
    attention_bias: bool = False
    mlp_bias: bool = False
