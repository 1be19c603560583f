"""The architectures that emlxd knows: one row each, from a checkpoint's own words to a ``ModelSpec``.

A row is keyed by ``model_type`` of config.json and says only how a family differs from the common decoder:
RMS norms before attention and before a gated SiLU feed-forward layer, rotary positions, no biases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from emlxd.graph import spec_parts as parts
from emlxd.graph.expert_families import WITH_EXPERTS
from emlxd.graph.family import Family
from emlxd.graph.names import SANDWICH
from emlxd.graph.recurrent_families import RECURRENT
from emlxd.graph.spec import ExpertsSpec, NormSpec
from emlxd.graph.spec_parts import Config

POST: Final = {"norm_places": ("attention_out", "mlp_out")}


def _gemma(c: Config) -> dict[str, Any]:
    return {
        "norm": NormSpec(parts.norm_eps(c), plus_one=True),
        "activation": parts.activation(c, "gelu_pytorch_tanh", "hidden_activation"),
        "embedding_scale": c["hidden_size"] ** 0.5,
    }


def _gemma2(c: Config) -> dict[str, Any]:
    soft_caps = {
        "attention_soft_cap": float(c.get("attn_logit_softcapping") or 0),
        "logit_soft_cap": float(c.get("final_logit_softcapping") or 0),
    }
    return _gemma(c) | parts.SANDWICHED | soft_caps | {"attention_scale": c["query_pre_attn_scalar"] ** -0.5}


def _gemma3_layer(c: Config, i: int) -> dict[str, Any]:
    if not parts.slides(c, i, (i + 1) % int(c.get("sliding_window_pattern") or 6) != 0):
        return {}
    local = (c.get("rope_parameters") or {}).get("sliding_attention", {}).get("rope_theta")
    base = float(local or c.get("rope_local_base_freq", 10000.0))
    return parts.window(c) | {"rope": parts.rope(c, base=base, scaling=None)}


def _gemma4(c: Config) -> dict[str, Any]:
    return {
        **parts.QK_NORM,
        **parts.SANDWICHED,
        "activation": parts.activation(c, "gelu_pytorch_tanh", "hidden_activation"),
        "embedding_scale": c["hidden_size"] ** 0.5,
        "attention_scale": 1.0,
        "logit_soft_cap": float(c.get("final_logit_softcapping") or 0),
        "value_norm": True,
        "layer_scale": True,
        "layer_inputs": int(c["hidden_size_per_layer_input"]),
        "layer_vocab_size": int(c["vocab_size_per_layer_input"]),
    }


def _gemma4_layer(c: Config, i: int) -> dict[str, Any]:
    types = c.get("layer_types") or [
        "full_attention" if (n + 1) % int(c["sliding_window_pattern"]) == 0 else "sliding_attention"
        for n in range(parts.layer_count(c))
    ]
    kind, owners = types[i], parts.layer_count(c) - int(c["num_kv_shared_layers"])
    wide = i >= owners > 0 and c["use_double_wide_mlp"]
    layer: dict[str, Any] = {"width": (2 if wide else 1) * int(c["intermediate_size"])}
    if i >= owners:
        layer["source"] = owners - 1 - types[:owners][::-1].index(kind)
    if c["enable_moe_block"]:
        layer["experts"] = ExpertsSpec(
            count=int(c["num_experts"]),
            chosen=int(c["top_k_experts"]),
            width=int(c["moe_intermediate_size"]),
            scores="softmax_chosen",
            beside=True,
        )
    if kind == "sliding_attention":
        dim = parts.head_dim_of(c)
        return layer | parts.window(c) | {"rope": parts.rope(c, kind, dims=dim)}
    dim = int(c.get("global_head_dim") or parts.head_dim_of(c))
    if tied := bool(c["attention_k_eq_v"]):
        layer["kv_heads"] = int(c.get("num_global_key_value_heads") or c["num_key_value_heads"])
    rope = parts.rope(c, kind, dims=dim)
    return layer | {"rope": rope, "head_dim": dim, "values_are_keys": tied}


def _olmo3_layer(c: Config, i: int) -> dict[str, Any]:
    if not parts.slides(c, i, (i + 1) % 4 != 0):
        return {}
    return parts.window(c) | {"rope": parts.rope(c, scaling=None)}


def _smollm3_layer(c: Config, i: int) -> dict[str, Any]:
    rotated = c.get("no_rope_layers")
    interval = int(c.get("no_rope_layer_interval", 4))
    has_rope = bool(rotated[i]) if rotated else (i + 1) % interval != 0
    return parts.by_layer_types(c, i) | ({} if has_rope else {"rope": None})


def _cohere(c: Config) -> dict[str, Any]:
    return {
        "norm": parts.layer_norm(c, bias=bool(c.get("layer_norm_bias", False))),
        "norm_places": ("attention_in",),
        "parallel": True,
        "qk_norm": "each_head" if c.get("use_qk_norm") else None,
        "qk_norm_spec": parts.layer_norm(c, bias=False),
        "logit_scale": float(c.get("logit_scale", 0.0625)),
        "tied_head": True,
    }


def _cohere2_layer(c: Config, i: int) -> dict[str, Any]:
    if parts.slides(c, i, (i + 1) % int(c.get("sliding_window_pattern") or 4) != 0):
        return parts.window(c)
    return {"rope": None}


def _exaone4_layer(c: Config, i: int) -> dict[str, Any]:
    pattern = c.get("sliding_window_pattern")
    if not c.get("sliding_window") or not pattern:
        return {}
    local = pattern[i % len(pattern)] == "L" if isinstance(pattern, str) else (i + 1) % int(pattern) != 0
    return parts.window(c) if parts.slides(c, i, local) else {"rope": None}


def _stablelm(c: Config) -> dict[str, Any]:
    parallel = bool(c.get("use_parallel_residual", False))
    return {
        "norm": parts.layer_norm(c, bias=True),
        "norm_places": ("attention_in",) if parallel else ("attention_in", "mlp_in"),
        "parallel": parallel,
        "qkv_bias": bool(c.get("use_qkv_bias", False)),
        "qk_norm": "each_head" if c.get("qk_layernorm") else None,
        "qk_norm_spec": parts.layer_norm(c, bias=False),
    }


def _phi(c: Config) -> dict[str, Any]:
    return {
        "norm": parts.layer_norm(c, bias=True),
        "norm_places": ("attention_in",),
        "parallel": True,
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "gated": False,
        "activation": parts.activation(c, "gelu_new"),
    }


def _nemotron(c: Config) -> dict[str, Any]:
    return {
        "norm": NormSpec(parts.norm_eps(c), "layer", bias=True, plus_one=True),
        "gated": False,
        "activation": parts.activation(c, "relu2"),
    }


def _internlm3(c: Config) -> dict[str, Any]:
    bias = bool(c.get("qkv_bias", False))
    return {"qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": bool(c.get("bias", False))}


def _minicpm(c: Config) -> dict[str, Any]:
    return {
        "embedding_scale": float(c["scale_emb"]),
        "residual_scale": float(c["scale_depth"]) / math.sqrt(c["num_hidden_layers"]),
        "logit_scale": c["dim_model_base"] / c["hidden_size"],
    }


def _qwen2_layer(c: Config, i: int) -> dict[str, Any]:
    if not c.get("use_sliding_window"):
        return {}
    return parts.window(c) if parts.slides(c, i, i >= int(c.get("max_window_layers", 0))) else {}


FAMILIES: Final[Mapping[str, Family]] = {
    "cohere": Family("Command R", _cohere, defaults={"rope_theta": 8e6, "rope_traditional": True}),
    "cohere2": Family(
        "Command R7B, Command A",
        _cohere,
        _cohere2_layer,
        defaults={"rope_theta": 50000.0, "rope_traditional": True},
    ),
    "ernie4_5": Family("ERNIE 4.5", parts.use_bias, defaults={"rope_traditional": True}),
    "exaone4": Family("EXAONE 4", lambda _: POST | parts.QK_NORM, _exaone4_layer),
    "gemma": Family("Gemma", _gemma),
    "gemma2": Family(
        "Gemma 2",
        _gemma2,
        lambda c, i: parts.window(c) if parts.slides(c, i, i % 2 == 0) else {},
        names=SANDWICH,
        defaults={
            "query_pre_attn_scalar": 144,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": Family(
        "Gemma 3 (text)",
        lambda c: _gemma2(c) | parts.QK_NORM,
        _gemma3_layer,
        names=SANDWICH,
        defaults={
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
            "sliding_window": 512,
            "head_dim": 256,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
        },
    ),
    "gemma4_text": Family(
        "Gemma 4 (text)",
        _gemma4,
        _gemma4_layer,
        names={
            **SANDWICH,
            "plain_out": "post_feedforward_layernorm_1",
            "experts_in": "pre_feedforward_layernorm_2",
            "experts_out": "post_feedforward_layernorm_2",
            "mlp.router": "router.proj",
            "mlp.router_scale": "router.scale",
            "mlp.expert_scale": "router.per_expert_scale",
            "mlp.stacked": ("experts.switch_glu", "experts"),
        },
        defaults={
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "head_dim": 256,
            "global_head_dim": 512,
            "sliding_window": 512,
            "sliding_window_pattern": 5,
            "rms_norm_eps": 1e-6,
            "vocab_size": 262144,
            "max_position_embeddings": 131072,
            "final_logit_softcapping": 30.0,
            "attention_k_eq_v": False,
            "use_double_wide_mlp": True,
            "enable_moe_block": False,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1e6,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
        ignored=("input_max", "input_min", "output_max", "output_min"),
    ),
    "glm": Family(
        "GLM 4 9B (2024)",
        lambda _: {"attention_out_bias": False},
        defaults={"rope_traditional": True, "tie_word_embeddings": True},
    ),
    "glm4": Family(
        "GLM 4",
        lambda c: parts.SANDWICHED | {"attention_out_bias": False},
        names={"attention_out": "post_self_attn_layernorm", "mlp_out": "post_mlp_layernorm"},
        defaults={"rope_traditional": True, "partial_rotary_factor": 0.5},
    ),
    "granite": Family("Granite 3", parts.granite),
    "helium": Family("Helium", lambda _: {"attention_out_bias": False}, defaults={"rope_traditional": True}),
    "internlm3": Family("InternLM 3", _internlm3),
    "llama": Family("Llama 2, 3; SmolLM 2; TeleChat 3"),
    "mimo": Family(
        "MiMo", lambda _: {"qkv_bias": True, "attention_out_bias": False}, ignored=("mtp_layers.",)
    ),
    "minicpm": Family("MiniCPM", _minicpm),
    "ministral3": Family("Ministral 3"),
    "mistral": Family("Mistral; Small 3 (text)", layer=parts.all_windowed),
    "nemotron": Family("Nemotron 4, Minitron", _nemotron, defaults={"partial_rotary_factor": 0.5}),
    "olmo2": Family("OLMo 2", lambda _: POST | {"qk_norm": "all_heads"}),
    "olmo3": Family("OLMo 3", lambda _: POST | {"qk_norm": "all_heads"}, _olmo3_layer),
    "phi": Family(
        "Phi 1.5, 2",
        _phi,
        names={
            "model.norm": "model.final_layernorm",
            "self_attn.o_proj": "self_attn.dense",
            "mlp.up_proj": "mlp.fc1",
            "mlp.down_proj": "mlp.fc2",
        },
        defaults={"partial_rotary_factor": 0.4},
    ),
    "phi3": Family("Phi 3, 3.5, 4", layer=parts.all_windowed),
    "qwen2": Family(
        "Qwen 2, 2.5; VL (text)",
        lambda _: {"qkv_bias": True, "attention_out_bias": False},
        _qwen2_layer,
        defaults={"rope_theta": 1e6},
    ),
    "qwen3": Family("Qwen 3; VL (text)", lambda _: parts.QK_NORM),
    "seed_oss": Family(
        "Seed-OSS", lambda c: {"attention_out_bias": bool(c.get("attention_out_bias", False))}
    ),
    "smollm3": Family("SmolLM 3", layer=_smollm3_layer),
    "stablelm": Family(
        "StableLM",
        _stablelm,
        names={"self_attn.q_norm": "self_attn.q_layernorm", "self_attn.k_norm": "self_attn.k_layernorm"},
    ),
    "starcoder2": Family(
        "StarCoder 2",
        lambda c: {
            "norm": parts.layer_norm(c, bias=True),
            "qkv_bias": True,
            "attention_out_bias": True,
            "mlp_bias": True,
            "gated": False,
            "activation": parts.activation(c, "gelu_pytorch_tanh"),
        },
        layer=parts.all_windowed,
        names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
    ),
    "youtu_llm": Family(
        "Youtu-LLM",
        parts.latent_own_eps,
        lambda c, _: {"rope": parts.latent_rope(c, traditional=bool(c.get("rope_traditional", True)))},
        defaults={"tie_word_embeddings": True},
    ),
    **WITH_EXPERTS,
    **RECURRENT,
}
"""By ``model_type``. ``ALIASES`` are other names for the same."""

ALIASES: Final[Mapping[str, str]] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_text",
    "iquestcoder": "llama",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "minimax_m2": "minimax",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "solar_open": "glm4_moe",
    "telechat3": "llama",
    "xverse": "llama",
}
