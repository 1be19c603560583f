"""Reads the folder of a LoRA adapter, as mlx-lm or as PEFT writes it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from emlxd.errors import ModelFormatError
from emlxd.graph.delta import LowRank
from emlxd.graph.folder import read_config
from emlxd.graph.safetensors import open_safetensors

Modules = Mapping[str, LowRank]
"""By the name of the projection: ``model.layers.0.self_attn.q_proj``."""

_MLX_NAME: Final = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m)")
_PEFT_NAME: Final = re.compile(
    r"base_model\.model\.(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector)(\.default)?(\.weight)?"
)
_PARTS: Final = {"lora_A": "lora_a", "lora_B": "lora_b", "lora_magnitude_vector": "m"}
_TEXT_MODEL: Final = re.compile(r"(?:language_model\.|model\.language_model\.)(?:model\.)?")
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")

# What PEFT's configuration may ask for that is more than x A B, or changes the weights below.
_PEFT_REFUSED: Final = (
    *("use_qalora", "fan_in_fan_out", "lora_bias", "modules_to_save", "layer_replication"),
    *("alora_invocation_tokens", "trainable_token_indices", "target_parameters"),
)
_PEFT_INITS: Final = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter that was read. Values are taken from the disk when they are evaluated."""

    path: Path
    modules: Modules


def read_adapter(path: Path, layers: int) -> AdapterFile:
    """The adapter in the folder ``path``, for a model of so many ``layers``. Raises ModelFormatError."""
    config = read_config(path, "adapter_config.json", "an adapter's folder")
    if "peft_type" in config:
        return AdapterFile(path, _read_peft(path, config))
    if "lora_parameters" in config or "fine_tune_type" in config:
        return AdapterFile(path, _read_mlx(path, config, layers))
    raise _bad(path, "has neither lora_parameters, as mlx-lm writes, nor peft_type, as PEFT does")


def _read_mlx(path: Path, config: Mapping[str, Any], layers: int) -> Modules:
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise _bad(path, f"has fine_tune_type '{kind}', expected 'lora' or 'dora'; a full one is a model")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise _bad(path, "has no lora_parameters")
    scale = _number(path, parameters, "scale")
    rank = _number(path, parameters, "rank")
    tensors = _tensors(path, "adapters.safetensors")
    turned = {name: tensor.T if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    modules = _paired(path, turned, _MLX_NAME, lambda module, r: scale, dora=kind == "dora")
    first = layers - _layers_adapted(path, config, layers)
    keys = parameters.get("keys")
    if keys is not None and not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        raise _bad(path, f"has keys {keys!r}, expected a list of names")
    for module, part in modules.items():
        if part.a.shape[-2] != rank:
            raise _bad_module(path, module, f"has rank {part.a.shape[-2]}, but lora_parameters say {rank:g}")
        place = _LAYER.fullmatch(module)
        chosen = place and int(place[1]) >= first and (keys is None or place[2] in keys)
        if not chosen and module not in (keys or ()):
            raise _bad_module(path, module, "is not among its num_layers and keys")
    return modules


def _layers_adapted(path: Path, config: Mapping[str, Any], layers: int) -> int:
    """How many layers from the last on; mlx-lm takes 0 and less for all of them."""
    count = int(_number(path, config, "num_layers"))
    return min(count, layers) if count > 0 else layers


def _read_peft(path: Path, config: Mapping[str, Any]) -> Modules:
    if config["peft_type"] != "LORA":
        raise _bad(path, f"has peft_type '{config['peft_type']}', expected 'LORA'")
    if refused := [key for key in _PEFT_REFUSED if config.get(key)]:
        raise _bad(path, f"sets {', '.join(refused)}, which emlxd does not compute")
    if (bias := config.get("bias", "none")) != "none":
        raise _bad(path, f"has bias '{bias}', expected 'none'")
    if (init := config.get("init_lora_weights", True)) not in _PEFT_INITS:
        raise _bad(path, f"has init_lora_weights '{init}', which changes the model's own weights")
    ranks, alphas = (_pattern(path, config, key) for key in ("rank_pattern", "alpha_pattern"))
    usual_rank, usual_alpha = _number(path, config, "r"), _number(path, config, "lora_alpha")

    def scale(module: str, rank: int) -> float:
        expected = ranks(module, usual_rank)
        if rank != expected:
            raise _bad_module(path, module, f"has rank {rank}, but adapter_config.json says {expected:g}")
        return alphas(module, usual_alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)

    if not (path / "adapter_model.safetensors").exists() and (path / "adapter_model.bin").exists():
        raise _bad(path, "comes with adapter_model.bin, expected adapter_model.safetensors")
    tensors = _tensors(path, "adapter_model.safetensors")
    return _paired(path, tensors, _PEFT_NAME, scale, dora=bool(config.get("use_dora")))


def _pattern(path: Path, config: Mapping[str, Any], key: str) -> Callable[[str, float], float]:
    """A number for a module, from PEFT's map of name endings, which are regular expressions."""
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise _bad(path, f"has a {key} that is no object")
    try:
        found = [(re.compile(rf"(.*\.)?({end})"), _number(path, patterns, end)) for end in patterns]
    except re.error as error:
        raise _bad(path, f"has a bad {key}: {error}") from None

    def value(module: str, usual: float) -> float:
        return next((number for ending, number in found if ending.fullmatch(module)), usual)

    return value


def _tensors(path: Path, name: str) -> dict[str, mx.array]:
    if not (path / name).is_file():
        raise ModelFormatError(f"{path}: has no {name}, which its adapter_config.json is for")
    return open_safetensors(path / name)


def _paired(
    path: Path,
    tensors: Mapping[str, mx.array],
    pattern: re.Pattern[str],
    scale: Callable[[str, int], float],
    *,
    dora: bool,
) -> Modules:
    """The parts of each module together; ``scale`` is told its name and rank."""
    parts: dict[str, dict[str, mx.array]] = {}
    for name, tensor in tensors.items():
        match = pattern.fullmatch(name)
        if match is None:
            raise _bad(path, f"comes with the tensor '{name}', which is no part of a LoRA", "the adapter")
        module = _TEXT_MODEL.sub("model.", match["module"], count=1)
        parts.setdefault(module, {})[_PARTS.get(match["part"], match["part"])] = tensor
    expected = {"lora_a", "lora_b"} | ({"m"} if dora else set())
    for module, found in parts.items():
        if found.keys() != expected:
            raise _bad_module(path, module, f"has {first_few(found)}, expected {first_few(expected)}")
        if not all(mx.issubdtype(part.dtype, mx.floating) for part in found.values()):
            raise _bad_module(path, module, f"has {found['lora_a'].dtype}, expected floating point")
    return {module: _checked(path, module, found, scale) for module, found in parts.items()}


def _checked(
    path: Path, module: str, parts: Mapping[str, mx.array], scale: Callable[[str, int], float]
) -> LowRank:
    a, b, magnitude = parts["lora_a"], parts["lora_b"], parts.get("m")
    fits = a.ndim == b.ndim in (2, 3) and a.shape[:-1] == (*b.shape[:-2], b.shape[-1]) and a.shape[-2]
    if not fits:
        raise _bad_module(path, module, f"is {a.shape} and {b.shape}, expected [r, in] and [out, r]")
    if magnitude is not None and (a.ndim == 3 or magnitude.shape != b.shape[:1]):
        raise _bad_module(
            path,
            module,
            f"has a magnitude of {magnitude.shape}, expected one of {b.shape[-2]} and no experts",
        )
    return LowRank(a, b.astype(mx.float32) * scale(module, a.shape[-2]), magnitude)


def _number(path: Path, values: Mapping[str, Any], key: str) -> float:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _bad(path, f"has {key} {value!r}, expected a number")
    return value


def _bad(path: Path, what: str, who: str = "adapter_config.json") -> ModelFormatError:
    return ModelFormatError(f"{path}: {who} {what}")


def _bad_module(path: Path, module: str, what: str) -> ModelFormatError:
    return ModelFormatError(f"{path}: '{module}' {what}")


def first_few(names: Iterable[str]) -> str:
    """The first few of many names."""
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
