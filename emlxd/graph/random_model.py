"""Models with random weights in the shapes of real ones, to measure speed where no real ones can be had."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

# The published config.json of each, less what does not bear on speed. ``tiny`` is for trying a benchmark out.
_LLAMA: Final = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "vocab_size": 151936,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "llama-1b": _LLAMA
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "llama-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "vocab_size": 151936,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "tiny": _LLAMA
    | {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "intermediate_size": 512,
        "num_key_value_heads": 2,
        "num_attention_heads": 4,
        "head_dim": 64,
        "vocab_size": 8192,
        "tie_word_embeddings": True,
    },
}

_ROUTER: Final = {"group_size": 64, "bits": 8}
_ROUNDS: Final = 5  # of measuring the bandwidth, the first of which may be slow
_ENOUGH: Final = 2.0  # seconds


def write_model(folder: Path, shape: str, bits: int | None, group_size: int = 64) -> Path:
    """Writes a Hugging Face folder of ``SHAPES[shape]``: bfloat16, or quantised to ``bits``. No tokenizer.

    As mlx-lm converts them: all experts of a layer in one tensor, the router of experts in 8 bits. A layer is
    a file, and more than one is never held in memory.
    """
    config = dict(SHAPES[shape])
    folder.mkdir(parents=True, exist_ok=True)
    formats: dict[str, Any] = {"group_size": group_size, "bits": bits}
    for index, part in enumerate(_parts(config)):
        tensors: dict[str, mx.array] = {}
        for stem, dims in part.items():
            weight = _random(dims)
            if bits and len(dims) > 1:
                if stem.endswith(".mlp.gate"):
                    formats[stem] = _ROUTER
                q = formats.get(stem, formats)
                packed = mx.quantize(weight, group_size=q["group_size"], bits=q["bits"])
                names = (f"{stem}.{part}" for part in ("weight", "scales", "biases"))
                tensors |= zip(names, packed, strict=True)
            else:
                tensors[f"{stem}.weight"] = weight
        mx.save_safetensors(str(folder / f"model-{index:05}.safetensors"), tensors)
    if bits:
        config["quantization"] = formats
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _random(dims: tuple[int, ...]) -> mx.array:
    """A matrix, or the ones of a norm."""
    return mx.random.normal(dims, dtype=mx.bfloat16) * 0.02 if len(dims) > 1 else mx.ones(dims, mx.bfloat16)


def _parts(config: Mapping[str, Any]) -> Iterator[dict[str, tuple[int, ...]]]:
    """The shapes of the weights at both ends, then those of each layer."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    ends: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,)}
    if not config["tie_word_embeddings"]:
        ends["lm_head"] = (vocab, hidden)
    yield ends
    layer = _attention(config) | _feed_forward(config)
    for index in range(config["num_hidden_layers"]):
        yield {f"model.layers.{index}.{stem}": dims for stem, dims in layer.items()}


def _attention(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, head = config["hidden_size"], config["head_dim"]
    q, kv = (config[key] * head for key in ("num_attention_heads", "num_key_value_heads"))
    norms = {"q_norm": (head,), "k_norm": (head,)} if config["model_type"].startswith("qwen3") else {}
    parts = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    return {"input_layernorm": (hidden,)} | {
        f"self_attn.{name}": dims for name, dims in (parts | norms).items()
    }


def _feed_forward(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, count = config["hidden_size"], config.get("num_experts")
    inner = config["moe_intermediate_size" if count else "intermediate_size"]
    each = (count,) if count else ()
    prefix = "mlp.switch_mlp" if count else "mlp"
    parts: dict[str, tuple[int, ...]] = {
        "post_attention_layernorm": (hidden,),
        f"{prefix}.gate_proj": (*each, inner, hidden),
        f"{prefix}.up_proj": (*each, inner, hidden),
        f"{prefix}.down_proj": (*each, hidden, inner),
    }
    return parts | {"mlp.gate": (count, hidden)} if count else parts


def copy_bandwidth(nbytes: int = 1 << 30, copies: int = 16) -> float:
    """Bytes a second that the device reads and writes when it copies: the ceiling for reading weights.

    The best of some rounds, each of which is so long that dispatching it does not count.
    """
    array = mx.zeros((nbytes // 4,), mx.float32)
    mx.eval(array)
    best, began = float("inf"), time.perf_counter()
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        for _ in range(copies):
            array = array + 1.0
        mx.eval(array)
        ended = time.perf_counter()
        best = min(best, ended - started)
        if ended - began > _ENOUGH:
            break
    del array
    mx.clear_cache()  # the copies take the room of a model
    return 2 * nbytes * copies / best
