"""Rows of the families that choose experts for each token, some of which also have latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from emlxd.graph import spec_parts as parts
from emlxd.graph.family import Family
from emlxd.graph.names import BLOCK_SPARSE, GRANITE_EXPERTS
from emlxd.graph.spec import ExpertsSpec
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
    return {"rope": parts.latent_rope(c), "experts": parts.routed_experts(c, i)}


def _afmoe_layer(c: Config, i: int) -> dict[str, Any]:
    experts = None
    if i >= int(c["num_dense_layers"]):
        width = int(c["moe_intermediate_size"])
        experts = ExpertsSpec(
            count=int(c["num_experts"]),
            chosen=int(c["num_experts_per_tok"]),
            width=width,
            scores="sigmoid" if c["score_func"] == "sigmoid" else "softmax",
            normalize=bool(c["route_norm"]),
            scale=float(c["route_scale"]),
            correction=True,
            groups=int(c["n_group"]),
            top_groups=int(c["topk_group"]),
            group_score="best_two",
            shared_width=width * int(c["num_shared_experts"]),
        )
    local = parts.by_layer_types(c, i)
    return {"experts": experts} | (local or {"rope": None})


def _bailing(c: Config) -> dict[str, Any]:
    if c.get("norm_head"):
        raise ValueError("norm_head is not supported")
    bias = bool(c.get("use_bias", False))
    return {
        "qkv_bias": bool(c.get("use_qkv_bias", False)),
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "qk_norm": "head" if c.get("use_qk_norm") else None,
    }


def _bailing_layer(c: Config, i: int) -> dict[str, Any]:
    rope = parts.rope(c, dims=int(c["rotary_dim"])) if "rotary_dim" in c else parts.rope(c)
    if i < int(c["first_k_dense_replace"]):
        return {"rope": rope}
    width = int(c["moe_intermediate_size"])
    shares = bool(c.get("moe_router_enable_shared_expert", True))
    shared_width = int(c.get("moe_shared_expert_intermediate_size") or width)
    experts = ExpertsSpec(
        count=int(c["num_experts"]),
        chosen=int(c["num_experts_per_tok"]),
        width=width,
        scores="sigmoid" if c.get("score_function") == "sigmoid" else "softmax",
        normalize=bool(c["norm_topk_prob"]),
        scale=float(c.get("routed_scaling_factor", 1.0)),
        correction=bool(c.get("moe_router_enable_expert_bias", False)),
        groups=int(c.get("n_group", 1)),
        top_groups=int(c.get("topk_group", 4)),
        group_score="best_two",
        shared_width=shared_width * int(c["num_shared_experts"]) if shares else 0,
        bias=bool(c.get("use_bias", False)),
    )
    return {"rope": rope, "experts": experts}


def _minimax_layer(c: Config, i: int) -> dict[str, Any]:
    experts = parts.local_experts(c, "sigmoid", normalize=True, correction=True)
    return {"rope": parts.rope(c, dims=int(c["rotary_dim"])), "experts": experts}


def _mistral4_layer(c: Config, i: int) -> dict[str, Any]:
    rope = parts.latent_rope(c, traditional=bool(c.get("rope_interleave", True)))
    experts = parts.routed_experts({"topk_method": "group_limited_greedy", **c}, i)
    return {"rope": rope, "experts": experts and replace(experts, group_score="best_two")}


_SIGMOID: Final = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}

WITH_EXPERTS: Final[Mapping[str, Family]] = {
    "afmoe": Family(
        "Arcee Trinity",
        lambda c: (
            parts.QK_NORM
            | parts.SANDWICHED
            | {
                "attention_gate": True,
                "embedding_scale": c["hidden_size"] ** 0.5 if c["mup_enabled"] else 1.0,
            }
        ),
        _afmoe_layer,
        names={
            "mlp_in": "pre_mlp_layernorm",
            "mlp_out": "post_mlp_layernorm",
            "mlp.router": "mlp.router.gate",
            "mlp.correction.e_score_correction_bias": "mlp.expert_bias",
        },
        defaults={
            "score_func": "sigmoid",
            "route_norm": True,
            "route_scale": 2.826,
            "n_group": 1,
            "topk_group": 1,
            "num_shared_experts": 1,
            "mup_enabled": True,
        },
    ),
    "bailing_moe": Family(
        "Ling, Ring",
        _bailing,
        _bailing_layer,
        names={
            "model.embed_tokens": "model.word_embeddings",
            "self_attn.qkv_proj": "attention.query_key_value",
            "self_attn.o_proj": "attention.dense",
            "self_attn.q_norm": "attention.query_layernorm",
            "self_attn.k_norm": "attention.key_layernorm",
            "mlp.router": ("mlp.gate.gate_proj", "mlp.gate"),
            "mlp.correction.e_score_correction_bias": "mlp.gate.expert_bias",
        },
    ),
    "deepseek": Family("DeepSeek MoE", layer=lambda c, i: {"experts": parts.routed_experts(c, i)}),
    "deepseek_v2": Family("DeepSeek V2", parts.latent, _deepseek_layer),
    "deepseek_v3": Family(
        "DeepSeek V3, R1; Kimi K2",
        parts.latent,
        _deepseek_layer,
        defaults=_SIGMOID | {"norm_topk_prob": True},
    ),
    "dots1": Family(
        "dots.llm1",
        lambda _: parts.QK_NORM | {"qkv_bias": False, "attention_out_bias": False},
        # Its config.json calls the function of the scores "noaux_tc".
        lambda c, i: {"experts": parts.routed_experts({**c, **_SIGMOID}, i)},
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
        defaults=_SIGMOID | {"partial_rotary_factor": 0.5},
    ),
    "glm4_moe_lite": Family(
        "GLM 4.7 Flash",
        parts.latent_own_eps,
        _deepseek_layer,
        defaults=_SIGMOID | {"norm_topk_prob": True, "first_k_dense_replace": 1},
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
    "minimax": Family(
        "MiniMax M2",
        lambda c: {"qk_norm": "all_heads" if c.get("use_qk_norm", True) else None},
        _minimax_layer,
        names={**BLOCK_SPARSE, "mlp.correction": "block_sparse_moe"},
    ),
    "mistral4": Family("Mistral Small 4 (text)", parts.latent, _mistral4_layer),
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
