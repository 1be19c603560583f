"""A GGUF file as a checkpoint: metadata become config.json's keys, tensors get the names of a family."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx

from emlxd.errors import ModelFormatError
from emlxd.graph.gguf import GgufFile
from emlxd.graph.gguf_blocks import from_gguf
from emlxd.graph.names import GGUF, Names, stored_stems
from emlxd.graph.weights import Weight

_CONFIG_KEYS: Final[Mapping[str, str]] = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "rope.freq_base": "rope_theta",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
_DERIVED: Final = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


@dataclass(frozen=True, slots=True)
class GgufRow:
    """How llama.cpp stores a family.

    ``permuted``: the rows of q and k in pairs. ``norms_plus_one``: norm weights with the one that the family
    adds to them. ``config``: further keys of config.json from those already known. ``with_experts`` is the
    ``model_type`` of files that have some, if it is another.
    """

    model_type: str
    with_experts: str = ""
    permuted: bool = False
    norms_plus_one: bool = False
    names: Names = field(default_factory=dict)
    config: Callable[[dict[str, Any]], dict[str, Any]] = lambda _: {}


def _gemma_query_scalar(layers_of_largest: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The largest Gemmas, told by their depth, scale scores by hidden size over heads, not head size."""

    def config(c: dict[str, Any]) -> dict[str, Any]:
        largest = c.get("num_hidden_layers") == layers_of_largest
        scalar = c["hidden_size"] // c["num_attention_heads"] if largest else c["head_dim"]
        return {"query_pre_attn_scalar": scalar}

    return config


def _local_experts(c: dict[str, Any]) -> dict[str, Any]:
    if not c.get("num_experts"):
        return {}
    width = c.get("moe_intermediate_size") or c["intermediate_size"]
    return {"num_local_experts": c["num_experts"], "intermediate_size": width}


def _qwen_experts(c: dict[str, Any]) -> dict[str, Any]:
    """Older files do not say how wide experts are: together those of a token are as wide as a plain layer."""
    width = c["intermediate_size"]
    usual = {
        "moe_intermediate_size": width // c["num_experts_per_tok"],
        "shared_expert_intermediate_size": width,
    }
    return {key: c.get(key, value) for key, value in usual.items()}


ROWS: Final[Mapping[str, GgufRow]] = {
    "llama": GgufRow("llama", "mixtral", permuted=True, config=_local_experts),
    "qwen2": GgufRow("qwen2"),
    "qwen2moe": GgufRow("qwen2_moe", config=_qwen_experts),
    "qwen3": GgufRow("qwen3"),
    "qwen3moe": GgufRow("qwen3_moe", config=lambda c: _qwen_experts(c) | {"norm_topk_prob": True}),
    "gemma": GgufRow("gemma", norms_plus_one=True),
    "gemma2": GgufRow("gemma2", norms_plus_one=True, config=_gemma_query_scalar(46)),
    "gemma3": GgufRow("gemma3_text", norms_plus_one=True, config=_gemma_query_scalar(62)),
    "gpt-oss": GgufRow("gpt_oss", names={"mlp_in": "post_attention_norm"}, config=_local_experts),
    "phi3": GgufRow("phi3", names={"mlp.gate_up_proj": "ffn_up"}),
}


class GgufCheckpoint:
    """Raises ModelFormatError for an architecture without a row."""

    converted = False

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self.metadata = file.metadata
        self._file = file
        self._left = set(file.tensors) - _DERIVED
        architecture = str(self.metadata.get("general.architecture"))
        if architecture not in ROWS:
            known = ", ".join(sorted(ROWS))
            raise ModelFormatError(
                f"{self.path}: the architecture '{architecture}' is not supported in GGUF files, "
                f"supported are: {known}"
            )
        self._row = ROWS[architecture]
        self._names = {**GGUF, **self._row.names}
        self.config = self._config(architecture)

    def _config(self, architecture: str) -> dict[str, Any]:
        config: dict[str, Any] = {"model_type": self._row.model_type}
        for key, name in _CONFIG_KEYS.items():
            value = self.metadata.get(f"{architecture}.{key}")
            if value is not None:
                config[name] = value
        if config.get("num_experts") and self._row.with_experts:
            config["model_type"] = self._row.with_experts
        if embedding := self._file.tensors.get("token_embd.weight"):
            config["vocab_size"] = embedding.shape[0]
        config["tie_word_embeddings"] = "output.weight" not in self._file.tensors
        config["rope_scaling"] = self._rope_scaling(architecture, config)
        try:
            head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            dims = self.metadata.get(f"{architecture}.rope.dimension_count", head_dim)
            return (
                config
                | {"head_dim": head_dim, "partial_rotary_factor": dims / head_dim}
                | (self._row.config(config | {"head_dim": head_dim}))
            )
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ModelFormatError(f"{self.path}: has no good value for {architecture}'s {error}") from None

    def _rope_scaling(self, architecture: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
        if "rope_freqs.weight" in self._file.tensors:
            return {"rope_type": "factors", "factors": self._vector("rope_freqs.weight")}
        if "rope_factors_long.weight" in self._file.tensors:
            return {
                "rope_type": "longrope",
                "long_factor": self._vector("rope_factors_long.weight"),
                "short_factor": self._vector("rope_factors_short.weight"),
            }
        kind = self.metadata.get(f"{architecture}.rope.scaling.type", "none")
        if kind == "none":
            return None
        return {
            "rope_type": kind,
            "factor": self.metadata.get(f"{architecture}.rope.scaling.factor", 1.0),
            "original_max_position_embeddings": config.get("original_max_position_embeddings", 4096),
        }

    def _vector(self, name: str) -> Any:
        if name not in self._file.tensors:
            raise ModelFormatError(f"{self.path}: the tensor '{name}' is missing")
        return from_gguf(self._file.tensors[name], self._file.read(name)).data.tolist()

    def has(self, name: str) -> bool:
        return self.stored_name(name) in self._left

    def take(self, name: str, dense: mx.Dtype | None = None) -> Weight | None:
        stored = self.stored_name(name)
        if stored not in self._left:
            return None
        self._left.discard(stored)
        weight = from_gguf(self._file.tensors[stored], self._file.read(stored), dense)
        if name.endswith("mlp.shared_expert_gate.weight") and len(weight.shape) == 1:
            return weight.map_rows(lambda part: part[None])
        if self._row.norms_plus_one and stored.endswith("norm.weight"):
            return Weight(weight.data - 1)
        if self._row.permuted and (match := re.search(r"self_attn\.([qk])_proj", name)):
            key = "num_attention_heads" if match[1] == "q" else "num_key_value_heads"
            heads = int(self.config.get(key) or self.config["num_attention_heads"])
            return weight.map_rows(lambda part: _unpermute(part, heads))
        return weight

    def stored_name(self, name: str) -> str:
        if name.endswith(".self_attn.sinks"):
            name = name.replace(".sinks", ".sinks.weight")
        stem, _, kind = name.rpartition(".")
        stored = stored_stems(stem, self._names)[0]
        return f"{stored.replace('model.layers.', 'blk.')}.{kind}"

    def leftovers(self) -> list[str]:
        return sorted(self._left)


def _unpermute(rows: mx.array, heads: int) -> mx.array:
    """Undoes llama.cpp's order, where the two halves that RoPE rotates together are neighbours."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return mx.contiguous(pairs.swapaxes(1, 2).reshape(rows.shape))
