"""Models with random weights in the shapes of real ones, to measure speed where no real ones can be had."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

# The published config.json of each, less what does not bear on speed.
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
}


def write_model(folder: Path, shape: str, bits: int | None, group_size: int = 64) -> Path:
    """Writes a Hugging Face folder of ``SHAPES[shape]``: bfloat16, or quantised to ``bits``. No tokenizer."""
    config = dict(SHAPES[shape])
    folder.mkdir(parents=True, exist_ok=True)
    if bits:
        config["quantization"] = {"group_size": group_size, "bits": bits}
    (folder / "config.json").write_text(json.dumps(config))
    for index, part in enumerate(_parts(config)):
        tensors: dict[str, mx.array] = {}
        for name, dims in part.items():
            weight = (
                mx.random.normal(dims, dtype=mx.bfloat16) * 0.02
                if len(dims) > 1
                else mx.ones(dims, mx.bfloat16)
            )
            if bits and len(dims) > 1:
                stem = name.removesuffix("weight")
                packed = mx.quantize(weight, group_size=group_size, bits=bits)
                tensors |= dict(zip((name, f"{stem}scales", f"{stem}biases"), packed, strict=True))
            else:
                tensors[name] = weight
        mx.save_safetensors(str(folder / f"model-{index:05}.safetensors"), tensors)
    return folder


def _parts(config: Mapping[str, Any]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Tensor shapes, some layers at a time, so that little is held in memory."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    ends: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        ends["lm_head.weight"] = (vocab, hidden)
    yield ends
    for index in range(config["num_hidden_layers"]):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        if config["model_type"] == "qwen3":
            layer |= {"self_attn.q_norm": (config["head_dim"],), "self_attn.k_norm": (config["head_dim"],)}
        yield {f"model.layers.{index}.{name}.weight": dims for name, dims in layer.items()}


def copy_bandwidth(nbytes: int = 1 << 30, repeats: int = 8) -> float:
    """Bytes a second that the device reads and writes when it copies: the ceiling for reading weights."""
    array = mx.zeros((nbytes // 4,), mx.float32)
    mx.eval([array + number for number in range(repeats)])
    started = time.perf_counter()
    mx.eval([array + number for number in range(repeats)])  # together: the host's part would count too
    return 2 * nbytes * repeats / (time.perf_counter() - started)
