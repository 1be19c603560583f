"""Random adapters for tiny models, made by mlx-lm's own layers, in mlx-lm's and in PEFT's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from tests.graph.tiny import random_parameters

KEYS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


def save_mlx(
    folder: Path,
    model: nn.Module,
    *,
    seed: int,
    rank: int = 4,
    layers: int = -1,
    kind: str = "lora",
    **parameters: Any,
) -> Path:
    """Turns ``model`` into one with LoRA layers, and writes these as mlx-lm's trainer does."""
    lora = {"rank": rank, "scale": 2.0, "dropout": 0.1, "keys": list(KEYS)} | parameters
    linear_to_lora_layers(model, layers, lora, use_dora=kind == "dora")
    mx.random.seed(seed)
    tensors = {
        name: 0.3 * value
        for name, value in tree_flatten(random_parameters(model))
        if name.endswith(("lora_a", "lora_b", ".m"))
    }
    write(folder, {"fine_tune_type": kind, "num_layers": layers, "lora_parameters": lora}, tensors)
    return folder


def as_peft(folder: Path, source: Path, **config: Any) -> Path:
    """The adapter in ``source``, as PEFT writes one: other names, transposed, alpha for the scale."""
    lora = json.loads((source / "adapter_config.json").read_text())["lora_parameters"]
    tensors = {}
    for name, tensor in mx.load(str(source / "adapters.safetensors")).items():  # type: ignore[union-attr]
        module, _, part = name.rpartition(".")
        stored = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}[part]
        tensors[f"base_model.model.{module}.{stored}"] = mx.contiguous(tensor.T)
    usual = {
        "peft_type": "LORA",
        "r": lora["rank"],
        "lora_alpha": lora["scale"] * lora["rank"],
        "bias": "none",
    }
    write(folder, usual | config, tensors, "adapter_model.safetensors")
    return folder


def write(
    folder: Path, config: Any, tensors: Mapping[str, mx.array], name: str = "adapters.safetensors"
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / name), dict(tensors))
