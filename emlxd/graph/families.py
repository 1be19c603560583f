"""From a checkpoint's config.json to a ``ModelSpec``, by the row of its family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from emlxd.errors import ModelFormatError
from emlxd.graph import spec_parts as parts
from emlxd.graph.family import Family
from emlxd.graph.family_table import ALIASES, FAMILIES
from emlxd.graph.recurrent_spec import RecurrentSpec
from emlxd.graph.rope import waves
from emlxd.graph.spec import LayerSpec, ModelSpec
from emlxd.graph.spec_parts import MAX_SIZE, Config


def family_of(config: Config, where: str) -> Family:
    """The row for a checkpoint. Raises ModelFormatError naming the architecture and those supported."""
    architecture = str(config.get("model_type"))
    if family := FAMILIES.get(ALIASES.get(architecture, architecture)):
        return family
    known = ", ".join(sorted(FAMILIES))
    raise ModelFormatError(
        f"{where}: the architecture '{architecture}' is not supported, supported are: {known}"
    )


def spec_of(config: Config, where: str) -> ModelSpec:
    """The spec of a checkpoint. Raises ModelFormatError for what is missing or makes no sense."""
    family = family_of(config, where)
    c = {**family.defaults, **{key: value for key, value in config.items() if value is not None}}
    with parts.bad_config_named(where):
        fields = parts.common(c) | family.fields(c)
        layers = [_sized(layer, fields) for layer in parts.layers(c, family.layer)]
        spec = ModelSpec(**fields, layers=_shared(layers))
        _check_rotation(spec)
    _check(spec, where)
    return spec


def _sized(layer: LayerSpec, fields: Mapping[str, Any]) -> LayerSpec:
    """With the model's sizes where it has none of its own."""
    return replace(
        layer,
        head_dim=layer.head_dim or fields["head_dim"],
        kv_heads=layer.kv_heads or fields["kv_heads"],
        width=layer.width or fields["intermediate_size"],
    )


def _shared(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Equal rotations become one object, and so one table."""
    ropes = [layer.rope for layer in layers]
    return tuple(replace(layer, rope=ropes[ropes.index(layer.rope)]) for layer in layers)


def _check_rotation(spec: ModelSpec) -> None:
    """Raises KeyError or ValueError for a scaling that no context could be computed with."""
    for layer in spec.layers:
        if layer.rope:
            waves(layer.rope, 1), waves(layer.rope, spec.max_position)


def _check(spec: ModelSpec, where: str) -> None:
    sizes = (spec.vocab_size, spec.hidden_size, spec.intermediate_size, spec.heads, spec.head_dim)
    counts = (len(spec.layers), spec.kv_heads, spec.max_position)
    if min(*sizes, *counts) < 1 or max(*sizes, *counts) > MAX_SIZE or spec.heads % spec.kv_heads:
        raise ModelFormatError(f"{where}: config describes an impossible model: {spec}")
    for layer in spec.layers:
        if min(layer.head_dim, layer.width, layer.kv_heads) < 1 or spec.heads % layer.kv_heads:
            raise ModelFormatError(f"{where}: config describes an impossible layer: {layer}")
        if layer.recurrent and not _possible(layer.recurrent):
            raise ModelFormatError(f"{where}: config describes an impossible layer: {layer.recurrent}")
        experts = layer.experts
        if experts and not 1 <= experts.chosen <= experts.count:
            raise ModelFormatError(
                f"{where}: config has {experts.count} experts and chooses {experts.chosen}"
            )


def _possible(recurrent: RecurrentSpec) -> bool:
    counts = [getattr(recurrent, one.name) for one in fields(recurrent) if one.type == "int"]
    return all(1 <= count <= MAX_SIZE for count in counts)
