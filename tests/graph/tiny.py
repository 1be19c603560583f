"""Tiny random models in the formats that users have, made by mlx-lm, which is also the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import llama

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def make_llama(seed: int = 0, **changes: Any) -> tuple[llama.Model, dict[str, Any]]:
    """A random model of mlx-lm's and its config.json. Weights are large enough for distinct answers."""
    mx.random.seed(seed)
    config = LLAMA | changes
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.update(_scaled(model))
    mx.eval(model.parameters())
    return model, config


def random_parameters(model: nn.Module) -> Any:
    """Values for every parameter: large enough for distinct answers, none at its initial 0 or 1."""

    def value(name: str, p: mx.array) -> mx.array:
        if name.endswith("A_log"):  # a state is to fade slowly
            return mx.random.normal(p.shape) - 2
        if p.ndim == 1:
            return 1 + 0.3 * mx.random.normal(p.shape)
        return mx.random.normal(p.shape) * (3 / p.shape[-1]) ** 0.5

    return tree_map_with_path(value, model.parameters())


def _scaled(model: nn.Module) -> Any:
    return nn.utils.tree_map(lambda p: p * 3 if p.ndim > 1 else p, model.parameters())


def save(
    folder: Path, model: nn.Module, config: dict[str, Any], *, shards: int = 1, **tensors: mx.array
) -> Path:
    """Writes a Hugging Face folder without a tokenizer. ``tensors`` are added or, as None, left out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(model.parameters())) | tensors
    names = sorted(name for name, array in weights.items() if array is not None)
    for shard in range(shards):
        part = {name: weights[name] for name in names[shard::shards]}
        mx.save_safetensors(str(folder / f"model-{shard + 1:05}-of-{shards:05}.safetensors"), part)
    return folder


def quantize(
    model: nn.Module, config: dict[str, Any], *, bits: int = 4, group_size: int = 32
) -> dict[str, Any]:
    """Quantises the model in place, as mlx-lm's converter does, and returns the config to save."""
    nn.quantize(model, group_size=group_size, bits=bits)
    return config | {"quantization": {"group_size": group_size, "bits": bits}}
