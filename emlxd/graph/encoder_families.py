"""The encoders that emlxd knows: one row each, from a checkpoint's config.json to an ``EncoderSpec``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from emlxd.errors import ModelFormatError
from emlxd.graph import spec_parts as parts
from emlxd.graph.encoder_spec import EncoderLayerSpec, EncoderNames, EncoderSpec, ScoreHeadSpec
from emlxd.graph.spec import NormSpec, RopeSpec
from emlxd.graph.spec_parts import MAX_SIZE, Config


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """``fields`` of an ``EncoderSpec`` beside those of BERT; ``keys``: what its config.json calls BERT's."""

    title: str
    names: EncoderNames
    head: ScoreHeadSpec
    fields: Callable[[Config], dict[str, Any]]
    layer: Callable[[Config, int], EncoderLayerSpec] = lambda _, __: EncoderLayerSpec()
    keys: Mapping[str, str] | None = None


_BERT_NAMES: Final = EncoderNames(
    base=("", "bert.", "roberta."),
    tokens="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layer="encoder.layer.{}.",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up=("intermediate.dense",),
    down="output.dense",
    mlp_norm="output.LayerNorm",
)
_DISTILBERT_NAMES: Final = EncoderNames(
    base=("", "distilbert."),
    tokens="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    types="",
    embedding_norm="embeddings.LayerNorm",
    layer="transformer.layer.{}.",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up=("ffn.lin1",),
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
)
_MODERNBERT_NAMES: Final = EncoderNames(
    base=("", "model."),
    tokens="embeddings.tok_embeddings",
    positions="",
    types="",
    embedding_norm="embeddings.norm",
    layer="layers.{}.",
    qkv=("attn.Wqkv",),
    out="attn.Wo",
    attention_norm="attn_norm",
    up=("mlp.Wi",),
    down="mlp.Wo",
    mlp_norm="mlp_norm",
    final_norm="final_norm",
)
_NOMIC_NAMES: Final = EncoderNames(
    base=("", "bert."),
    tokens="embeddings.word_embeddings",
    positions="",
    types="embeddings.token_type_embeddings",
    embedding_norm="emb_ln",
    layer="encoder.layers.{}.",
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    attention_norm="norm1",
    up=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
    mlp_norm="norm2",
)
_MPNET_NAMES: Final = replace(
    _BERT_NAMES,
    base=("", "mpnet."),
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    out="attention.attn.o",
    attention_norm="attention.LayerNorm",
    distances="encoder.relative_attention_bias",
)
_ROBERTA_HEAD: Final = ScoreHeadSpec("classifier.dense", "tanh", "classifier.out_proj")


def _bert(c: Config) -> dict[str, Any]:
    if c.get("position_embedding_type", "absolute") != "absolute":
        raise ValueError(f"position_embedding_type '{c['position_embedding_type']}', supported is absolute")
    rows = int(c["max_position_embeddings"])
    return {"positions": rows, "max_position": rows, "token_types": int(c["type_vocab_size"])}


def _roberta(c: Config) -> dict[str, Any]:
    """Positions are counted from the one after that of padding."""
    first = int(c["pad_token_id"]) + 1
    fields = _bert(c)
    return fields | {"first_position": first, "max_position": fields["positions"] - first}


def _mpnet(c: Config) -> dict[str, Any]:
    """Positions as RoBERTa's, whatever ``pad_token_id`` says, and a bias for distances."""
    ranges, rows = int(c.get("relative_attention_num_buckets", 32)), int(c["max_position_embeddings"])
    if ranges != 32:
        raise ValueError(f"relative_attention_num_buckets {ranges}, supported are 32")
    return {"positions": rows, "first_position": 2, "max_position": rows - 2, "distances": True}


def _distilbert(c: Config) -> dict[str, Any]:
    rows = int(c["max_position_embeddings"])
    return {
        "positions": rows,
        "max_position": rows,
        "activation": parts.activation(c, "gelu", "activation"),
        "norm": NormSpec(1e-12, "layer", bias=True),
    }


def _modernbert(c: Config) -> dict[str, Any]:
    bias = bool(c.get("attention_bias", False))
    return {
        "max_position": int(c["max_position_embeddings"]),
        "norm": NormSpec(float(c.get("norm_eps", 1e-5)), "layer", bias=bool(c.get("norm_bias", False))),
        "activation": parts.activation(c, "gelu", "hidden_activation"),
        "gated": True,
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bool(c.get("mlp_bias", False)),
        "pre_norm": True,
        "head": ScoreHeadSpec(
            "head.dense",
            parts.activation(c, "gelu", "classifier_activation"),
            "classifier",
            norm="head.norm",
            dense_bias=bool(c.get("classifier_bias", False)),
            mean=c.get("classifier_pooling", "cls") == "mean",
        ),
    }


def _modernbert_layer(c: Config, i: int) -> EncoderLayerSpec:
    """Every third layer sees everything, the others half of ``local_attention`` to either side."""
    types = c.get("layer_types")
    every = int(c.get("global_attn_every_n_layers", 3))
    slides = types[i] == "sliding_attention" if types else i % every != 0
    kind, usual, key = (
        ("sliding_attention", 10000.0, "local_rope_theta")
        if slides
        else ("full_attention", 160000.0, "global_rope_theta")
    )
    given = (c.get("rope_parameters") or {}).get(kind) or {}
    base = float(given.get("rope_theta") or c.get(key) or usual)
    return EncoderLayerSpec(
        rope=RopeSpec(parts.head_dim_of(c), base),
        window=int(c.get("local_attention", 128)) // 2 if slides else None,
        attention_norm=i > 0,
    )


def _nomic(c: Config) -> dict[str, Any]:
    refused = [key for key in ("num_experts", "rotary_scaling_factor", "prenorm") if c.get(key)]
    if refused or c.get("activation_function", "swiglu") not in ("swiglu", "silu"):
        name = refused[0] if refused else "activation_function"
        raise ValueError(f"{name} {c[name]!r}, which is not supported")
    qkv_bias = bool(c.get("qkv_proj_bias", False))
    return {
        "max_position": int(c["max_position_embeddings"]),
        "token_types": int(c["type_vocab_size"]),
        "activation": "silu",
        "gated": True,
        "qkv_bias": qkv_bias,
        "out_bias": qkv_bias,
        "mlp_bias": bool(c.get("mlp_fc1_bias", False)),
    }


def _nomic_layer(c: Config, _: int) -> EncoderLayerSpec:
    dims = int(parts.head_dim_of(c) * float(c.get("rotary_emb_fraction", 1.0)))
    given = (c.get("rope_parameters") or {}).get("rope_theta")
    return EncoderLayerSpec(rope=RopeSpec(dims, float(given or c.get("rotary_emb_base", 1000.0))))


ENCODERS: Final[Mapping[str, EncoderFamily]] = {
    "bert": EncoderFamily(
        "BERT (MiniLM, BGE, E5, GTE)",
        _BERT_NAMES,
        ScoreHeadSpec("{base}pooler.dense", "tanh", "classifier"),
        _bert,
    ),
    "roberta": EncoderFamily("RoBERTa", _BERT_NAMES, _ROBERTA_HEAD, _roberta),
    "xlm-roberta": EncoderFamily(
        "XLM-RoBERTa (BGE-M3, multilingual E5)", _BERT_NAMES, _ROBERTA_HEAD, _roberta
    ),
    "camembert": EncoderFamily("CamemBERT", _BERT_NAMES, _ROBERTA_HEAD, _roberta),
    "mpnet": EncoderFamily("MPNet (all-mpnet-base-v2)", _MPNET_NAMES, _ROBERTA_HEAD, _mpnet),
    "distilbert": EncoderFamily(
        "DistilBERT",
        _DISTILBERT_NAMES,
        ScoreHeadSpec("pre_classifier", "relu", "classifier"),
        _distilbert,
        keys={
            "hidden_size": "dim",
            "intermediate_size": "hidden_dim",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
        },
    ),
    "modernbert": EncoderFamily(
        "ModernBERT",
        _MODERNBERT_NAMES,
        ScoreHeadSpec("head.dense", "gelu", "classifier"),
        _modernbert,
        _modernbert_layer,
    ),
    "nomic_bert": EncoderFamily(
        "Nomic BERT (nomic-embed-text)",
        _NOMIC_NAMES,
        ScoreHeadSpec("{base}pooler.dense", "tanh", "classifier"),
        _nomic,
        _nomic_layer,
        keys={
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "max_position_embeddings": "n_positions",
            "layer_norm_eps": "layer_norm_epsilon",
        },
    ),
}


def encoder_spec_of(config: Config, where: str) -> EncoderSpec:
    """The spec of a checkpoint. Raises ModelFormatError for what is not known, missing or makes no sense."""
    architecture = str(config.get("model_type"))
    family = ENCODERS.get(architecture)
    if family is None:
        known = ", ".join(sorted(ENCODERS))
        raise ModelFormatError(
            f"{where}: the encoder '{architecture}' is not supported, supported are: {known}"
        )
    c = {name: value for name, value in config.items() if value is not None}
    c |= {usual: c[own] for usual, own in (family.keys or {}).items() if own in c}
    with parts.bad_config_named(where):
        spec = EncoderSpec(
            **(_common(c, family) | family.fields(c)),
            layers=tuple(family.layer(c, index) for index in range(parts.layer_count(c))),
        )
    sizes = (spec.vocab_size, spec.hidden_size, spec.intermediate_size, spec.heads, spec.max_position)
    if min(sizes) < 1 or max(sizes) > MAX_SIZE or spec.hidden_size % spec.heads:
        raise ModelFormatError(f"{where}: config describes an impossible model: {spec}")
    return spec


def _common(c: Config, family: EncoderFamily) -> dict[str, Any]:
    return {
        "architecture": c["model_type"],
        "vocab_size": int(c["vocab_size"]),
        "hidden_size": int(c["hidden_size"]),
        "intermediate_size": int(c["intermediate_size"]),
        "heads": int(c["num_attention_heads"]),
        "norm": NormSpec(float(c.get("layer_norm_eps", 1e-12)), "layer", bias=True),
        "activation": parts.activation(c, "gelu") if "hidden_act" in c else "gelu",
        "names": family.names,
        "head": family.head,
    }
