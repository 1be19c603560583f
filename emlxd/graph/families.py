"""The architectures that emlxd knows: one row each, from a checkpoint's own words to a ``ModelSpec``.

A row is keyed by ``model_type`` of config.json, which is also ``general.architecture`` of GGUF.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from emlxd.errors import ModelFormatError
from emlxd.graph.spec import ModelSpec, RopeSpec

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """How a family differs from the common decoder.

    ``gguf_permuted``: llama.cpp stores the rows of q and k in pairs for this family.
    """

    spec: Callable[[Config], dict[str, Any]] = lambda _: {}
    gguf_permuted: bool = False


FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family(
        lambda c: {"attention_bias": c.get("attention_bias", False), "mlp_bias": c.get("mlp_bias", False)},
        gguf_permuted=True,
    ),
}


def family_of(config: Config, where: str) -> Family:
    """The row for a checkpoint. Raises ModelFormatError naming the architecture and those supported."""
    architecture = config.get("model_type")
    if family := FAMILIES.get(str(architecture)):
        return family
    known = ", ".join(sorted(FAMILIES))
    raise ModelFormatError(
        f"{where}: the architecture '{architecture}' is not supported, supported are: {known}"
    )


def spec_of(config: Config, where: str) -> ModelSpec:
    """The spec of a checkpoint. Raises ModelFormatError for what is missing or makes no sense."""
    family = family_of(config, where)
    try:
        spec = ModelSpec(**_common(config), **family.spec(config))
    except KeyError as error:
        raise ModelFormatError(f"{where}: config has no '{error.args[0]}'") from None
    except (TypeError, ValueError) as error:
        raise ModelFormatError(f"{where}: config has a value of the wrong type: {error}") from None
    _check(spec, where)
    return spec


def _common(c: Config) -> dict[str, Any]:
    heads = int(c["num_attention_heads"])
    head_dim = int(c.get("head_dim") or c["hidden_size"] // heads)
    scaling = c.get("rope_scaling")
    return {
        "architecture": c["model_type"],
        "vocab_size": int(c["vocab_size"]),
        "hidden_size": int(c["hidden_size"]),
        "intermediate_size": int(c["intermediate_size"]),
        "layers": int(c["num_hidden_layers"]),
        "heads": heads,
        "kv_heads": int(c.get("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "norm_eps": float(c["rms_norm_eps"]),
        "rope": RopeSpec(head_dim, float(c.get("rope_theta", 10000.0)), scaling),
        "max_position": int(c.get("max_position_embeddings", 2048)),
        "tied_head": bool(c.get("tie_word_embeddings", False)),
    }


def _check(spec: ModelSpec, where: str) -> None:
    sizes = (
        spec.vocab_size,
        spec.hidden_size,
        spec.intermediate_size,
        spec.layers,
        spec.heads,
        spec.head_dim,
    )
    if min(sizes) < 1 or spec.kv_heads < 1 or spec.heads % spec.kv_heads:
        raise ModelFormatError(f"{where}: config describes an impossible model: {spec}")
