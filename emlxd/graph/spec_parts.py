"""Readers of config.json that the rows of ``family_table.py`` share. They raise KeyError for missing keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from emlxd.errors import ModelFormatError
from emlxd.graph.recurrent_spec import DeltaNetSpec, MambaSpec
from emlxd.graph.rope import yarn_magnitude
from emlxd.graph.spec import ExpertsSpec, LatentSpec, LayerSpec, NormSpec, RopeSpec, Scores

Config = Mapping[str, Any]

MAX_LAYERS: Final = 1024
MAX_SIZE: Final = 2**28
MAX_ROPE_DIMS: Final = 4096

QK_NORM: Final = {"qk_norm": "head"}
SANDWICHED: Final = {"norm_places": ("attention_in", "attention_out", "mlp_in", "mlp_out")}

_ACTIVATIONS: Final[Mapping[str, str]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
_NORM_EPS: Final = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon", "norm_eps")


@contextmanager
def bad_config_named(where: str) -> Iterator[None]:
    """Turns what reading a config.json may raise into ModelFormatError."""
    try:
        yield
    except KeyError as error:
        raise ModelFormatError(f"{where}: config has no '{error.args[0]}'") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError, IndexError) as error:
        raise ModelFormatError(f"{where}: config has a bad value: {error}") from None


def layer_count(c: Config) -> int:
    count = int(c["num_hidden_layers"])
    if not 1 <= count <= MAX_LAYERS:
        raise ValueError(f"num_hidden_layers {count}, at most {MAX_LAYERS} are possible")
    return count


def common(c: Config) -> dict[str, Any]:
    """The fields of a ``ModelSpec`` that most families take from config.json in the same way."""
    heads = int(c["num_attention_heads"])
    head_dim = head_dim_of(c)
    bias = bool(c.get("attention_bias", False))
    tied = c.get("tie_word_embeddings")
    return {
        "architecture": c["model_type"],
        "vocab_size": int(c["vocab_size"]),
        "hidden_size": int(c["hidden_size"]),
        "intermediate_size": int(c["intermediate_size"]),
        "heads": heads,
        "kv_heads": int(c.get("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "norm": NormSpec(norm_eps(c)),
        "max_position": int(c.get("max_position_embeddings", 2048)),
        "attention_scale": head_dim**-0.5,
        "tied_head": None if tied is None else bool(tied),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bool(c.get("mlp_bias", False)),
        "activation": activation(c),
        "position_scale": _position_scale(c),
    }


def layers(c: Config, layer: Callable[[Config, int], dict[str, Any]]) -> tuple[LayerSpec, ...]:
    """``layer`` says how layer i differs from one that sees everything and rotates as config.json says."""
    usual = rope(c)
    return tuple(LayerSpec(**({"rope": usual} | layer(c, i))) for i in range(layer_count(c)))


def head_dim_of(c: Config) -> int:
    return int(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])


def norm_eps(c: Config) -> float:
    given = [float(c[name]) for name in _NORM_EPS if name in c]
    if not given:
        raise KeyError(_NORM_EPS[0])
    return given[0]


def layer_norm(c: Config, *, bias: bool) -> NormSpec:
    return NormSpec(norm_eps(c), "layer", bias=bias)


def activation(c: Config, usual: str = "silu", key: str = "hidden_act") -> str:
    name = str(c.get(key, usual))
    if name not in _ACTIVATIONS:
        raise ValueError(f"hidden_act '{name}', supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def rope(c: Config, kind: str = "full_attention", **changes: Any) -> RopeSpec:
    """Rotation as config.json says for layers of a ``kind``, with ``changes``."""
    parameters: Config = c.get("rope_parameters") or {}
    parameters = parameters.get(kind, parameters)
    scaling: Config = c.get("rope_scaling") or parameters
    if "original_max_position_embeddings" in c:
        scaling = {"original_max_position_embeddings": c["original_max_position_embeddings"], **scaling}
    part = parameters.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1.0
    fields: dict[str, Any] = {
        "dims": int(head_dim_of(c) * part),
        "base": float(parameters.get("rope_theta") or c.get("rope_theta") or 10000.0),
        "scaling": scaling or None,
        "traditional": bool(c.get("rope_traditional", False)),
        "max_position": int(c.get("max_position_embeddings", 2048)),
    }
    spec = RopeSpec(**(fields | changes))
    if not 2 <= spec.dims <= MAX_ROPE_DIMS or spec.dims % 2:
        raise ValueError(f"{spec.dims} rotated dimensions")
    return spec


def by_layer_types(c: Config, i: int) -> dict[str, Any]:
    """A window in the layers that config.json calls sliding."""
    types = c.get("layer_types")
    return window(c) if types and types[i] == "sliding_attention" else {}


def all_windowed(c: Config, i: int) -> dict[str, Any]:
    """The same window in all layers, if config.json has one."""
    return by_layer_types(c, i) if c.get("layer_types") else window(c)


def slides(c: Config, i: int, otherwise: bool) -> bool:
    """Whether layer i has a window: as ``layer_types`` says, else ``otherwise``."""
    types = c.get("layer_types")
    return types[i] == "sliding_attention" if types else otherwise


def window(c: Config) -> dict[str, Any]:
    size = c.get("sliding_window")
    return {"window": int(size)} if size else {}


def _position_scale(c: Config) -> tuple[float, int] | None:
    parameters = c.get("rope_parameters") or {}
    beta = parameters.get("llama_4_scaling_beta")
    return (float(beta), int(parameters["original_max_position_embeddings"])) if beta else None


def qwen_experts(c: Config, **more: Any) -> ExpertsSpec:
    return ExpertsSpec(
        count=int(c["num_experts"]),
        chosen=int(c["num_experts_per_tok"]),
        width=int(c["moe_intermediate_size"]),
        scores="softmax",
        normalize=bool(c.get("norm_topk_prob", False)),
        **more,
    )


def delta_net(c: Config, *, grouped: bool) -> DeltaNetSpec:
    net = DeltaNetSpec(
        key_heads=int(c["linear_num_key_heads"]),
        value_heads=int(c["linear_num_value_heads"]),
        key_dim=int(c["linear_key_head_dim"]),
        value_dim=int(c["linear_value_head_dim"]),
        width=int(c["linear_conv_kernel_dim"]),
        grouped=grouped,
    )
    if net.value_heads % net.key_heads:
        raise ValueError(f"{net.value_heads} value heads cannot share {net.key_heads} key heads")
    return net


def mamba(c: Config) -> MambaSpec:
    least, most = c["time_step_limit"]
    mamba = MambaSpec(
        heads=int(c["mamba_n_heads"]),
        head_dim=int(c["mamba_d_head"]),
        state_dim=int(c["mamba_d_state"]),
        groups=int(c["mamba_n_groups"]),
        width=int(c["mamba_d_conv"]),
        conv_bias=bool(c["mamba_conv_bias"]),
        bias=bool(c["mamba_proj_bias"]),
        step_limits=(float(least), float(most)),
    )
    if mamba.heads % mamba.groups:
        raise ValueError(f"{mamba.heads} heads cannot be {mamba.groups} groups")
    return mamba


def qwen_sparse(c: Config, i: int) -> bool:
    """Whether layer i of a Qwen is made of experts."""
    step = int(c.get("decoder_sparse_step", 1))
    return i not in (c.get("mlp_only_layers") or ()) and (i + 1) % step == 0


def local_experts(c: Config, scores: Scores, **more: Any) -> ExpertsSpec:
    """Experts as Mixtral's config.json names their number."""
    return ExpertsSpec(
        count=int(c["num_local_experts"]),
        chosen=int(c["num_experts_per_tok"]),
        width=int(c["intermediate_size"]),
        scores=scores,
        **more,
    )


def routed_experts(c: Config, i: int) -> ExpertsSpec | None:
    """DeepSeek's and GLM's experts, from layer ``first_k_dense_replace`` on."""
    if not c.get("n_routed_experts") or i < int(c.get("first_k_dense_replace", 0)):
        return None
    if i % int(c.get("moe_layer_freq", 1)):
        return None
    by_sigmoid = c.get("scoring_func", "softmax") == "sigmoid"
    grouped = c.get("topk_method") in ("noaux_tc", "group_limited_greedy")
    width = int(c["moe_intermediate_size"])
    return ExpertsSpec(
        count=int(c["n_routed_experts"]),
        chosen=int(c["num_experts_per_tok"]),
        width=width,
        scores="sigmoid" if by_sigmoid else "softmax",
        normalize=bool(c.get("norm_topk_prob", False)),
        scale=float(c.get("routed_scaling_factor", 1.0)),
        correction=c.get("topk_method") == "noaux_tc",
        groups=int(c.get("n_group") or 1) if grouped else 1,
        top_groups=int(c.get("topk_group") or 1),
        group_score="best_two" if by_sigmoid else "best",
        shared_width=width * int(c.get("n_shared_experts") or 0),
    )


def ernie_experts(c: Config, i: int) -> ExpertsSpec | None:
    first, last = c.get("moe_layer_start_index", 0), c.get("moe_layer_end_index")
    first = min(first) if isinstance(first, list) else int(first)
    last = max(last) if isinstance(last, list) else int(c["num_hidden_layers"] - 1 if last is None else last)
    if not first <= i <= last or (i + 1) % int(c.get("moe_layer_interval", 1)):
        return None
    width = int(c.get("moe_intermediate_size") or c["intermediate_size"])
    return ExpertsSpec(
        count=int(c["moe_num_experts"]),
        chosen=int(c.get("moe_k", 1)),
        width=width,
        scores="sigmoid" if c.get("moe_gate_act") == "sigmoid" else "softmax",
        normalize=True,
        correction=None,  # mlx-lm's converter leaves it out
        shared_width=width * int(c.get("moe_num_shared_experts") or 0),
        bias=bool(c.get("use_bias", False)),
    )


def use_bias(c: Config) -> dict[str, Any]:
    """Biases everywhere, or nowhere."""
    bias = bool(c.get("use_bias", False))
    return {"qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": bias}


def granite(c: Config) -> dict[str, Any]:
    """Granite's multipliers."""
    return {
        "attention_scale": float(c["attention_multiplier"]),
        "embedding_scale": float(c["embedding_multiplier"]),
        "residual_scale": float(c["residual_multiplier"]),
        "logit_scale": 1 / float(c["logits_scaling"]),
    }


def latent_rope(c: Config, *, traditional: bool = True) -> RopeSpec:
    """Of the part of a head that is rotated."""
    return rope(c, dims=int(c["qk_rope_head_dim"]), traditional=traditional)


def latent_own_eps(c: Config) -> dict[str, Any]:
    """``latent``, whose norms are as exact as the model's others."""
    return latent(c, eps=norm_eps(c))


def latent(c: Config, *, eps: float = 1e-6) -> dict[str, Any]:
    """Fields of a ``ModelSpec`` with multi-head latent attention; ``eps`` is that of its norms."""
    plain, rotated = int(c["qk_nope_head_dim"]), int(c["qk_rope_head_dim"])
    scaling = c.get("rope_scaling") or c.get("rope_parameters") or {}
    sharper = yarn_magnitude(float(scaling.get("factor", 1)), float(scaling.get("mscale_all_dim", 0)))
    rank = c.get("q_lora_rank")
    return {
        "latent": LatentSpec(
            rank=int(c["kv_lora_rank"]),
            plain_dim=plain,
            rope_dim=rotated,
            value_dim=int(c["v_head_dim"]),
            query_rank=None if rank is None else int(rank),
            eps=eps,
        ),
        "head_dim": plain + rotated,
        "attention_scale": (plain + rotated) ** -0.5 * sharper**2,
    }
