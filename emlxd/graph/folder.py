"""A model folder as Hugging Face and mlx-lm write it: config.json and safetensors, maybe quantised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import mlx.core as mx

from emlxd.errors import ModelFormatError
from emlxd.graph.families import family_of
from emlxd.graph.family import Family
from emlxd.graph.names import COMMON, stored_stems
from emlxd.graph.safetensors import open_safetensors
from emlxd.graph.spec_parts import bad_config_named
from emlxd.graph.weights import Quantization, Weight, from_fp8
from emlxd.json_files import read_object

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
_TEXT_MODEL: Final = re.compile(r"^(language_model\.|model\.language_model\.)(model\.)?(.+)")
# Where those that see do not give the text part a name of its own.
_OTHER_PARTS: Final = ("visual.", "vision_tower.", "multi_modal_projector.")

T = TypeVar("T")


class FolderCheckpoint:
    """Of a model that also sees or hears, only the text part is read.

    ``family`` is what config.json names, unless the caller knows better.
    """

    def __init__(self, path: Path, family: Family | None = None) -> None:
        self.path = path
        config = read_config(path)
        part = config.get("text_config")
        self.config = config | part if isinstance(part, dict) else config
        family = family or family_of(self.config, str(path))
        self._names = {**COMMON, **family.names}
        self._ignored = family.ignored
        with bad_config_named(str(path)):
            self._quantization = _text_names(self.config.get("quantization") or {})
        self._tensors = self._open_tensors()
        kernels = [tensor for name, tensor in self._tensors.items() if name.endswith("conv1d.weight")]
        self._converted = all(kernel.shape[-1] == 1 for kernel in kernels)

    @property
    def converted(self) -> bool:
        """The channels of a convolution are last in MLX, its width is last in PyTorch."""
        return self._converted

    def _open_tensors(self) -> dict[str, mx.array]:
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ModelFormatError(f"{self.path}: has no *.safetensors files")
        tensors: dict[str, mx.array] = {}
        for file in files:
            tensors |= open_safetensors(file)
        if "embed_tokens.weight" in tensors:  # saved without a head, as embedding models are
            tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
        return _text_part(tensors) if any(map(_TEXT_MODEL.match, tensors)) else tensors

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def take(self, name: str, dense: mx.Dtype | None = None) -> Weight | None:
        stored = self._find(name)
        if stored is None:
            return None
        weight = self._weight(stored)
        return weight.dense(dense) if dense else weight

    def _weight(self, stored: str) -> Weight:
        data = self._tensors.pop(stored)
        stem = stored.removesuffix(".weight")
        if stored.endswith("_blocks"):
            scales = self._tensors.pop(f"{stored.removesuffix('_blocks')}_scales", None)
            return Weight(data.view(mx.uint32).flatten(-2), scales, None, Quantization(32, 4, "mxfp4"))
        if stem == stored:
            return Weight(data)
        if (scales := self._tensors.pop(f"{stem}.scales", None)) is not None:
            return Weight(
                data, scales, self._tensors.pop(f"{stem}.biases", None), self._quantization_of(stem)
            )
        if (scales := self._tensors.pop(f"{stem}.weight_scale_inv", None)) is not None:
            return from_fp8(data, scales)
        return Weight(data)

    def stored_name(self, name: str) -> str:
        return stored_stems(name, self._names)[0]

    def leftovers(self) -> list[str]:
        count = int(self.config.get("num_hidden_layers", 0))
        return sorted(name for name in self._tensors if not self._without_use(name, count))

    def _find(self, name: str) -> str | None:
        for full in stored_stems(name, self._names):
            stored, _, kind = full.rpartition(".")
            spellings = [full, f"{stored}_{kind}"]
            if kind == "weight":
                spellings += [f"{stored}_blocks", stored]
            for spelling in spellings:
                if spelling in self._tensors:
                    return spelling
        return None

    def _quantization_of(self, stem: str) -> Quantization:
        own = self._quantization.get(stem)
        settings = self._quantization | own if isinstance(own, dict) else self._quantization
        return Quantization(
            settings.get("group_size", 64), settings.get("bits", 4), settings.get("mode", "affine")
        )

    def _without_use(self, name: str, layers: int) -> bool:
        """Layers past the last only guess further tokens; some files hold tables that are computed anew."""
        layer = _LAYER.match(name)
        if layer and int(layer[1]) >= layers:
            return True
        if "rotary_emb.inv_freq" in name or name.startswith(_OTHER_PARTS):
            return True
        return any(part in name for part in self._ignored)


def read_config(path: Path, name: str = "config.json", expected: str = "a model folder") -> dict[str, Any]:
    """The JSON object in a folder's file ``name``. Raises ModelFormatError."""
    if not (path / name).is_file():
        raise ModelFormatError(f"{path}: has no {name}, expected {expected}")
    return read_object(path / name)


def _text_part(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Without those of parts that see or hear."""
    own = {n: t for n, t in tensors.items() if _TEXT_MODEL.match(n) or n.startswith("lm_head.")}
    return _text_names(own)


def _text_names(named: Mapping[str, T]) -> dict[str, T]:
    """``language_model.model.norm`` and ``model.language_model.norm`` become ``model.norm``."""
    return {_TEXT_MODEL.sub(_text_name, name): value for name, value in named.items()}


def _text_name(match: re.Match[str]) -> str:
    within, rest = match[2], match[3]
    return rest if rest.startswith("lm_head") and not within else f"model.{rest}"
