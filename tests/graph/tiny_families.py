"""For every family a config.json of a tiny model, in the words of the family's own."""

from __future__ import annotations

import importlib
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from tests.graph import tiny

BASE: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 160,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
GRANITE: Final[dict[str, Any]] = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
    "attention_bias": False,
    "mlp_bias": False,
}
QWEN_MOE: Final[dict[str, Any]] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_MOE: Final[dict[str, Any]] = {"num_local_experts": 6, "num_experts_per_tok": 2}
YARN: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
LONGROPE: Final[dict[str, Any]] = {
    "type": "longrope",
    "long_factor": [1.0 + 0.3 * i for i in range(8)],
    "short_factor": [1.0] * 8,
    "original_max_position_embeddings": 64,
}
ROUTED: Final[dict[str, Any]] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
LATENT: Final[dict[str, Any]] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
}
DELTA_NET: Final[dict[str, Any]] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 3,
}
IN_A_LARGER_MODEL: Final = ("qwen3_5",)
"""Their config.json has that of the text part in ``text_config``."""

CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "afmoe": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 16,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "n_group": 4,
        "topk_group": 2,
    },
    "bailing_moe": {
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_shared_experts": 2,
        "norm_topk_prob": True,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "use_qkv_bias": True,
        "partial_rotary_factor": 0.5,
        "moe_router_enable_expert_bias": True,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "n_group": 4,
        "topk_group": 2,
        "moe_shared_expert_intermediate_size": 40,
    },
    "cohere": {"use_qk_norm": True, "layer_norm_eps": 1e-5, "logit_scale": 0.5, "attention_bias": True},
    "cohere2": {
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.5,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
    "deepseek": ROUTED
    | {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "rope_scaling": None, "num_key_value_heads": 4},
    "deepseek_v2": ROUTED | LATENT | {"topk_method": "group_limited_greedy", "norm_topk_prob": False},
    "deepseek_v3": ROUTED | LATENT,
    "dots1": ROUTED | {"scoring_func": "noaux_tc"},
    "ernie4_5": {"use_bias": True},
    "ernie4_5_moe": {
        "use_bias": True,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
    },
    "exaone4": {"sliding_window": 16, "sliding_window_pattern": "LLG", "rope_scaling": None},
    "gemma": {"hidden_activation": "gelu", "tie_word_embeddings": None},
    "gemma2": {
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 9.0,
        "tie_word_embeddings": None,
    },
    "gemma3_text": {
        "query_pre_attn_scalar": 24,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": None,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 3,
        "sliding_window": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 160,
        "final_logit_softcapping": 9.0,
        "tie_word_embeddings": True,
    },
    "glm": {"attention_bias": True},
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "glm4_moe": ROUTED
    | {"attention_bias": True, "partial_rotary_factor": 0.5, "use_qk_norm": True, "rope_scaling": None},
    "glm4_moe_lite": ROUTED | LATENT | {"rope_scaling": None, "rms_norm_eps": 0.1},
    "gpt_oss": LOCAL_MOE
    | {
        "sliding_window": 16,
        "rope_scaling": YARN | {"factor": 8.0},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "granite": GRANITE | {"tie_word_embeddings": True},
    "granitemoehybrid": GRANITE
    | LOCAL_MOE
    | {
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 48,
        "mamba_n_heads": 6,
        "mamba_d_head": 12,
        "mamba_d_state": 24,
        "mamba_n_groups": 2,
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
        "mamba_proj_bias": True,
        "position_embedding_type": "nope",
    },
    "granitemoe": GRANITE | LOCAL_MOE,
    "helium": {"attention_bias": True, "mlp_bias": True},
    "internlm3": {"qkv_bias": True, "bias": True, "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}},
    "lfm2": {
        "norm_eps": 1e-5,
        "conv_bias": True,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "lfm2_moe": {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.5,
    },
    "llama": {},
    "mimo": {},
    "minicpm": {"scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 32},
    "minimax": LOCAL_MOE | {"rotary_dim": 8, "shared_intermediate_size": 0},
    "ministral3": {
        "rope_parameters": YARN | {"rope_theta": 1e5, "llama_4_scaling_beta": 0.4, "mscale": 1.0},
    },
    "mistral": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 16,
    },
    "mistral4": ROUTED
    | LATENT
    | {
        "rope_scaling": None,
        "rope_parameters": YARN | {"rope_theta": 1e5, "llama_4_scaling_beta": 0.4, "mscale_all_dim": 0.7},
    },
    "mixtral": LOCAL_MOE,
    "nemotron": {"norm_eps": 1e-5, "hidden_act": "relu2", "attention_bias": True, "mlp_bias": True},
    "olmo2": {},
    "olmo3": {
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_scaling": YARN,
    },
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "phi": {"layer_norm_eps": 1e-5},
    "phi3": {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64},
    "phimoe": LOCAL_MOE
    | {
        "rope_scaling": LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.2},
        "original_max_position_embeddings": 64,
    },
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_moe": QWEN_MOE | {"shared_expert_intermediate_size": 48},
    "qwen3": {},
    "qwen3_moe": QWEN_MOE | {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": []},
    "qwen3_5": DELTA_NET
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5}},
    "qwen3_next": DELTA_NET
    | QWEN_MOE
    | {
        "shared_expert_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.5,
    },
    "seed_oss": {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {
        "use_qkv_bias": True,
        "partial_rotary_factor": 0.25,
        "layer_norm_eps": 1e-5,
        "qk_layernorm": True,
    },
    "starcoder2": {"norm_epsilon": 1e-5, "hidden_act": "gelu", "tie_word_embeddings": True},
    "youtu_llm": LATENT | {"rope_scaling": None, "rms_norm_eps": 0.1},
}


def oracle_of(family: str, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """mlx-lm's model with random weights, and its config.json."""
    config = config_of(family, **changes)
    module = importlib.import_module(f"mlx_lm.models.{ {'mistral': 'llama'}.get(family, family) }")
    mx.random.seed(1)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tiny.random_parameters(model))
    mx.eval(model.parameters())
    return model, config


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    config = {"model_type": family} | BASE | CONFIGS[family] | changes
    if family in IN_A_LARGER_MODEL:
        return {"model_type": family, "text_config": config | {"model_type": f"{family}_text"}}
    return {name: value for name, value in config.items() if value is not None or name == "rope_scaling"}
