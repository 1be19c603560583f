"""Rows of the families that choose experts for each token, some of which also have latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from emlxd.graph import spec_parts as parts
from emlxd.graph.family import Family
from emlxd.graph.names import BLOCK_SPARSE, GRANITE_EXPERTS
from emlxd.graph.spec_parts import Config


def _phimoe(c: Config) -> dict[str, Any]:
    bias = bool(c.get("attention_bias", True))
    return {
        "norm": parts.layer_norm(c, bias=True),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "head_bias": bool(c.get("lm_head_bias", True)),
    }


def _gpt_oss_layer(c: Config, i: int) -> dict[str, Any]:
    experts = parts.local_experts(c, "softmax_chosen", router_bias=True, bias=True, interleaved=True)
    return {"experts": experts} | (parts.window(c) if parts.slides(c, i, i % 2 == 0) else {})


def _deepseek_layer(c: Config, i: int) -> dict[str, Any]:
    rope = parts.rope(c, dims=int(c["qk_rope_head_dim"]), traditional=True)
    return {"rope": rope, "experts": parts.routed_experts(c, i)}


WITH_EXPERTS: Final[Mapping[str, Family]] = {
    "deepseek_v2": Family("DeepSeek V2", parts.latent, _deepseek_layer),
    "deepseek_v3": Family(
        "DeepSeek V3, R1; Kimi K2",
        parts.latent,
        _deepseek_layer,
        defaults={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True},
    ),
    "ernie4_5_moe": Family(
        "ERNIE 4.5 with experts",
        parts.use_bias,
        lambda c, i: {"experts": parts.ernie_experts(c, i)},
        defaults={"rope_traditional": True},
        names={"mlp.correction": ("mlp.moe_statics", "mlp.gate.moe_statics")},
        ignored=("mtp_",),
    ),
    "glm4_moe": Family(
        "GLM 4.5, 4.6; Solar Open",
        lambda c: {"attention_out_bias": False, "qk_norm": "head" if c.get("use_qk_norm") else None},
        lambda c, i: {"experts": parts.routed_experts(c, i)},
        defaults={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "partial_rotary_factor": 0.5},
    ),
    "gpt_oss": Family(
        "gpt-oss",
        lambda c: {
            "qkv_bias": True,
            "attention_out_bias": True,
            "sinks": True,
            "activation": "swiglu_clipped",
        },
        _gpt_oss_layer,
        names={"mlp.router": "mlp.router", "mlp.stacked": "mlp.experts"},
    ),
    "granitemoe": Family(
        "Granite 3 with experts",
        parts.granite,
        lambda c, i: {"experts": parts.local_experts(c, "softmax_chosen")},
        names=GRANITE_EXPERTS,
    ),
    "mixtral": Family(
        "Mixtral",
        layer=lambda c, i: parts.all_windowed(c, i) | {"experts": parts.local_experts(c, "softmax_chosen")},
        names=BLOCK_SPARSE,
        defaults={"rope_theta": 1e6},
    ),
    "olmoe": Family(
        "OLMoE",
        lambda _: {"qk_norm": "all_heads"},
        lambda c, i: {"experts": parts.qwen_experts({"moe_intermediate_size": c["intermediate_size"], **c})},
    ),
    "phimoe": Family(
        "Phi 3.5 MoE",
        _phimoe,
        lambda c, i: {
            "experts": parts.local_experts(c, "sparsemixer", jitter=float(c.get("router_jitter_noise", 0.01)))
        },
        names=BLOCK_SPARSE,
    ),
    "qwen2_moe": Family(
        "Qwen 1.5, 2 with experts",
        lambda _: {"qkv_bias": True, "attention_out_bias": False},
        lambda c, i: {
            "experts": parts.qwen_experts(
                c, shared_width=int(c["shared_expert_intermediate_size"]), shared_gate=True
            )
            if parts.qwen_sparse(c, i)
            else None
        },
        names={"mlp.shared_experts": "mlp.shared_expert"},
        defaults={"rope_theta": 1e6},
    ),
    "qwen3_moe": Family(
        "Qwen 3 with experts; VL (text)",
        lambda _: parts.QK_NORM,
        lambda c, i: {"experts": parts.qwen_experts(c) if parts.qwen_sparse(c, i) else None},
    ),
}
"""By ``model_type``."""
