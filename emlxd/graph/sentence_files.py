"""What sentence-transformers writes beside a model: how its hidden states become one vector, and prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from emlxd.errors import ModelFormatError
from emlxd.json_files import read_json, read_object

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

# In the order in which several of them are put side by side.
_MODES: Final[Mapping[str, PoolingMode]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODULES: Final = ("Transformer", "Pooling", "Normalize", "Dense")
_IDENTITY: Final = "torch.nn.modules.linear.Identity"


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A linear layer after pooling; its tensors are in a folder of its own."""

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class SentenceSpec:
    """From hidden states to a vector, and what to write before texts of a kind.

    ``max_tokens``: what the model was trained to read, if it says so.
    """

    pooling: tuple[PoolingMode, ...]
    dense: tuple[DenseSpec, ...] = ()
    normalize: bool = True
    max_tokens: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def is_sentence_model(folder: Path) -> bool:
    """Whether sentence-transformers wrote it."""
    return (folder / "modules.json").is_file()


def read_sentence_spec(folder: Path, usual: PoolingMode) -> SentenceSpec:
    """What the folder says, or ``usual`` pooling and vectors of length 1. Raises ModelFormatError."""
    if not is_sentence_model(folder):
        return SentenceSpec((usual,))
    pooling: tuple[PoolingMode, ...] = (usual,)
    dense: list[DenseSpec] = []
    normalize = False
    for module in _modules(folder):
        kind, place = module["type"].rpartition(".")[2], folder / module.get("path", "")
        if kind not in _MODULES:
            raise ModelFormatError(
                f"{folder}: modules.json has '{module['type']}', supported are {', '.join(_MODULES)}"
            )
        if kind == "Pooling":
            pooling = _pooling(place / "config.json")
        elif kind == "Dense":
            dense.append(_dense(place))
        elif kind == "Normalize":
            normalize = True
    texts = read_object(folder / "config_sentence_transformers.json")
    limit = read_object(folder / "sentence_bert_config.json").get("max_seq_length")
    return SentenceSpec(
        pooling=pooling,
        dense=tuple(dense),
        normalize=normalize,
        max_tokens=int(limit) if limit else None,
        prompts={name: text for name, text in (texts.get("prompts") or {}).items() if isinstance(text, str)},
        default_prompt=texts.get("default_prompt_name"),
    )


def _modules(folder: Path) -> list[dict[str, Any]]:
    file = folder / "modules.json"
    modules = read_json(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelFormatError(f"{file}: expected a list of modules")
    for module in modules:
        if not isinstance(module.get("type"), str) or not isinstance(module.get("path", ""), str):
            raise ModelFormatError(f"{file}: expected a type and a path in {module}")
    return modules


def _pooling(file: Path) -> tuple[PoolingMode, ...]:
    config = read_object(file)
    if config.get("include_prompt", True) is not True:
        raise ModelFormatError(f"{file}: include_prompt is false, which is not supported")
    named = config.get("pooling_mode")
    listed = [named] if isinstance(named, str) else named or []
    modes = tuple(mode for key, mode in _MODES.items() if config.get(key) or mode in listed)
    if not modes or len(modes) < len(listed):
        raise ModelFormatError(f"{file}: has no pooling mode out of {', '.join(_MODES.values())}")
    return modes


def _dense(folder: Path) -> DenseSpec:
    config = read_object(folder / "config.json")
    try:
        return DenseSpec(
            folder=folder,
            inputs=int(config["in_features"]),
            outputs=int(config["out_features"]),
            bias=bool(config.get("bias", True)),
            activation=str(config.get("activation_function", _IDENTITY)).rpartition(".")[2].lower(),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFormatError(f"{folder / 'config.json'}: expected in_features and out_features") from error
