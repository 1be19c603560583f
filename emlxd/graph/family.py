"""How a row of the tables of families looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from emlxd.graph import spec_parts as parts
from emlxd.graph.names import Names
from emlxd.graph.spec_parts import Config


@dataclass(frozen=True, slots=True)
class Family:
    """How a family differs from the common decoder.

    ``fields`` of ``ModelSpec``; ``layer``: fields of ``LayerSpec`` for layer i; ``names`` of tensors;
    ``defaults`` for keys that its config.json may leave out; ``ignored``: tensors that no text model needs.
    """

    title: str
    fields: Callable[[Config], dict[str, Any]] = lambda _: {}
    layer: Callable[[Config, int], dict[str, Any]] = parts.by_layer_types
    names: Names = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
