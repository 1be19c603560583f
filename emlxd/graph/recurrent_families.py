"""Rows of the families whose layers carry a recurrent state, which most mix with layers of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from emlxd.graph import spec_parts as parts
from emlxd.graph.family import Family
from emlxd.graph.names import GRANITE_EXPERTS
from emlxd.graph.recurrent_spec import ShortConvSpec
from emlxd.graph.spec import ExpertsSpec, NormSpec
from emlxd.graph.spec_parts import Config


def _granite_hybrid_layer(c: Config, i: int) -> dict[str, Any]:
    experts = None
    if c.get("num_local_experts"):
        shared = int(c["shared_intermediate_size"])
        experts = parts.local_experts(c, "softmax_chosen", shared_width=shared)
    if c["layer_types"][i] == "mamba":
        return {"experts": experts, "rope": None, "recurrent": parts.mamba(c)}
    rotated = c.get("position_embedding_type", "rope") != "nope"
    return {"experts": experts, "rope": parts.rope(c, scaling=None) if rotated else None}


def _lfm2(c: Config) -> dict[str, Any]:
    width = int(c.get("block_ff_dim") or c["intermediate_size"])
    if c.get("block_auto_adjust_ff_dim", True):
        width = int(float(c.get("block_ffn_dim_multiplier") or 1.0) * int(2 * width / 3))
        step = int(c.get("block_multiple_of", 256))
        width = -(-width // step) * step
    return parts.QK_NORM | {"intermediate_size": width, "tied_head": True}


def _lfm2_layer(c: Config, i: int) -> dict[str, Any]:
    attends = c.get("full_attn_idxs")
    if i in attends if attends is not None else c["layer_types"][i] == "full_attention":
        return {}
    bias = bool(c.get("conv_bias", False))
    return {"rope": None, "recurrent": ShortConvSpec(int(c["hidden_size"]), int(c["conv_L_cache"]), bias)}


def _lfm2_moe_layer(c: Config, i: int) -> dict[str, Any]:
    if i < int(c["num_dense_layers"]):
        return _lfm2_layer(c, i)
    experts = ExpertsSpec(
        count=int(c["num_experts"]),
        chosen=int(c["num_experts_per_tok"]),
        width=int(c["moe_intermediate_size"]),
        scores="sigmoid",
        normalize=bool(c["norm_topk_prob"]),
        scale=float(c.get("routed_scaling_factor", 1.0)),
        correction=bool(c["use_expert_bias"]),
    )
    return _lfm2_layer(c, i) | {"experts": experts}


def _qwen3_next(c: Config) -> dict[str, Any]:
    return parts.QK_NORM | {
        "norm": NormSpec(parts.norm_eps(c), plus_one="published"),
        "attention_gate": True,
        "intermediate_size": int(c["intermediate_size"] or c["moe_intermediate_size"]),
    }


def _qwen3_next_layer(c: Config, i: int) -> dict[str, Any]:
    types = c.get("layer_types")
    attends = types[i] == "full_attention" if types else (i + 1) % int(c["full_attention_interval"]) == 0
    experts = None
    if c["num_experts"] and parts.qwen_sparse(c, i):
        shared = int(c["shared_expert_intermediate_size"])
        experts = parts.qwen_experts(c, shared_width=shared, shared_gate=True)
    if attends:
        return {"experts": experts}
    grouped = c["model_type"] == "qwen3_next"
    return {"experts": experts, "rope": None, "recurrent": parts.delta_net(c, grouped=grouped)}


_LFM2_NAMES: Final = {
    "model.norm": "model.embedding_norm",
    "attention_in": "operator_norm",
    "mlp_in": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
_QWEN3_NEXT: Final = {
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "num_experts": 0,
    "intermediate_size": 0,
    "norm_topk_prob": True,
}
_QWEN3_NEXT_NAMES: Final = {"mlp.shared_experts": "mlp.shared_expert"}

RECURRENT: Final[Mapping[str, Family]] = {
    "granitemoehybrid": Family(
        "Granite 4, with experts or without",
        parts.granite,
        _granite_hybrid_layer,
        names={
            **GRANITE_EXPERTS,
            "mlp.shared_experts.gate_up_proj": "shared_mlp.input_linear",
            "mlp.shared_experts.down_proj": "shared_mlp.output_linear",
            "mlp.gate_up_proj": "shared_mlp.input_linear",
            "mlp.down_proj": ("mlp.down_proj", "shared_mlp.output_linear"),
        },
        defaults={"tie_word_embeddings": True, "time_step_limit": (0.001, 100.0)},
    ),
    "lfm2": Family(
        "LFM 2",
        _lfm2,
        _lfm2_layer,
        names=_LFM2_NAMES,
        defaults={"rope_theta": 1e6, "conv_L_cache": 3, "intermediate_size": 0},
    ),
    "lfm2_moe": Family(
        "LFM 2 with experts",
        lambda _: parts.QK_NORM | {"tied_head": True},
        _lfm2_moe_layer,
        names={
            **_LFM2_NAMES,
            "mlp.gate_proj": ("feed_forward.gate_proj", "feed_forward.w1"),
            "mlp.up_proj": ("feed_forward.up_proj", "feed_forward.w3"),
            "mlp.down_proj": ("feed_forward.down_proj", "feed_forward.w2"),
            "mlp.router": "feed_forward.gate",
            "mlp.correction.e_score_correction_bias": "feed_forward.expert_bias",
            "mlp.stacked": "feed_forward.switch_mlp",
            "mlp.experts.*.gate_proj": "feed_forward.experts.*.w1",
            "mlp.experts.*.up_proj": "feed_forward.experts.*.w3",
            "mlp.experts.*.down_proj": "feed_forward.experts.*.w2",
        },
        defaults={"rope_theta": 1e6, "conv_L_cache": 3},
    ),
    "qwen3_5": Family(
        "Qwen 3.5 (text), with experts too",
        _qwen3_next,
        _qwen3_next_layer,
        names=_QWEN3_NEXT_NAMES,
        defaults=_QWEN3_NEXT,
        ignored=("mtp.",),
    ),
    "qwen3_next": Family(
        "Qwen 3 Next",
        _qwen3_next,
        _qwen3_next_layer,
        names=_QWEN3_NEXT_NAMES,
        defaults=_QWEN3_NEXT,
        ignored=("mtp.",),
    ),
}
