"""Opens a model's files: a GGUF file or a Hugging Face folder, both seen through one small interface.

Names and config keys are Hugging Face's, whatever the file calls them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol, cast

import mlx.core as mx

from emlxd.errors import ModelFormatError
from emlxd.graph.families import family_of
from emlxd.graph.gguf import GgufFile
from emlxd.graph.weights import Quantization, Weight, from_gguf


class Checkpoint(Protocol):
    """A model on disk. ``take`` hands out each tensor once, so that leftovers can be found."""

    path: Path

    @property
    def config(self) -> Mapping[str, Any]:
        """What config.json says, or would say."""

    def take(self, name: str) -> Weight:
        """The tensor ``name``, such as ``model.norm.weight``. Raises ModelFormatError if it is missing."""

    def leftovers(self) -> list[str]:
        """Names of the tensors that nobody took and that hold weights."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens ``path``. Raises ModelFormatError when it is no model that emlxd can read."""
    if path.is_dir():
        return FolderCheckpoint(path)
    if path.is_file():
        return GgufCheckpoint(GgufFile(path))
    raise ModelFormatError(f"{path}: no such file or folder, expected a GGUF file or a model folder")


_CONFIG_KEYS: Final[Mapping[str, str]] = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}

_TENSOR_NAMES: Final[Mapping[str, str]] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
_DERIVED: Final = {"rope_freqs.weight"}


class GgufCheckpoint:
    """A GGUF file, its metadata turned into config.json's keys."""

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self.metadata = file.metadata
        self._file = file
        self._left = set(file.tensors) - _DERIVED
        self.config = self._config()
        self._permuted = family_of(self.config, str(self.path)).gguf_permuted

    def _config(self) -> dict[str, Any]:
        architecture = self.metadata.get("general.architecture")
        config = {"model_type": architecture}
        for key, name in _CONFIG_KEYS.items():
            value = self.metadata.get(f"{architecture}.{key}")
            if value is not None:
                config[name] = value
        if embedding := self._file.tensors.get("token_embd.weight"):
            config["vocab_size"] = embedding.shape[0]
        config["tie_word_embeddings"] = "output.weight" not in self._file.tensors
        config["rope_scaling"] = self._rope_scaling(str(architecture))
        return config

    def _rope_scaling(self, architecture: str) -> dict[str, Any] | None:
        if "rope_freqs.weight" in self._file.tensors:
            factors = from_gguf(self._file.tensors["rope_freqs.weight"], self._file.read("rope_freqs.weight"))
            return {"rope_type": "factors", "factors": factors.data.tolist()}
        kind = self.metadata.get(f"{architecture}.rope.scaling.type", "none")
        if kind == "none":
            return None
        return {"rope_type": kind, "factor": self.metadata.get(f"{architecture}.rope.scaling.factor", 1.0)}

    def take(self, name: str) -> Weight:
        stored = _gguf_name(name)
        if stored not in self._file.tensors:
            raise ModelFormatError(f"{self.path}: the tensor '{stored}' is missing")
        self._left.discard(stored)
        weight = from_gguf(self._file.tensors[stored], self._file.read(stored))
        if self._permuted and (match := re.search(r"self_attn\.([qk])_proj", name)):
            key = "num_attention_heads" if match[1] == "q" else "num_key_value_heads"
            heads = int(self.config.get(key) or self.config["num_attention_heads"])
            return weight.map_rows(lambda part: _unpermute(part, heads))
        return weight

    def leftovers(self) -> list[str]:
        return sorted(self._left)


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if match := _LAYER.fullmatch(stem):
        return f"blk.{match[1]}.{_TENSOR_NAMES.get(match[2], match[2])}.{kind}"
    return f"{_TENSOR_NAMES.get(stem, stem)}.{kind}"


def _unpermute(rows: mx.array, heads: int) -> mx.array:
    """Undoes llama.cpp's order, where the two halves that RoPE rotates together are neighbours."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return mx.contiguous(pairs.swapaxes(1, 2).reshape(rows.shape))


class FolderCheckpoint:
    """A folder as Hugging Face and mlx-lm write it: config.json and safetensors, maybe quantised."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = self._read_config()
        self._quantization = self.config.get("quantization") or {}
        self._tensors = self._open_tensors()

    def _read_config(self) -> dict[str, Any]:
        file = self.path / "config.json"
        try:
            config = json.loads(file.read_text("utf-8"))
        except FileNotFoundError:
            raise ModelFormatError(f"{self.path}: has no config.json, expected a model folder") from None
        except (OSError, ValueError) as error:
            raise ModelFormatError(f"{file}: cannot be read: {error}") from None
        if not isinstance(config, dict):
            raise ModelFormatError(f"{file}: expected a JSON object")
        return config

    def _open_tensors(self) -> dict[str, mx.array]:
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ModelFormatError(f"{self.path}: has no *.safetensors files")
        tensors: dict[str, mx.array] = {}
        for file in files:
            try:
                loaded = mx.load(str(file))
            except RuntimeError as error:
                raise ModelFormatError(f"{file}: is damaged or truncated: {error}") from None
            tensors |= cast("dict[str, mx.array]", loaded)
        return tensors

    def take(self, name: str) -> Weight:
        data = self._tensors.pop(name, None)
        if data is None:
            raise ModelFormatError(f"{self.path}: the tensor '{name}' is missing")
        stem, _, kind = name.rpartition(".")
        scales = self._tensors.pop(f"{stem}.scales", None) if kind == "weight" else None
        if scales is None:
            return Weight(data)
        return Weight(data, scales, self._tensors.pop(f"{stem}.biases", None), self._quantization_of(stem))

    def _quantization_of(self, stem: str) -> Quantization:
        own = self._quantization.get(stem)
        settings = self._quantization | own if isinstance(own, dict) else self._quantization
        return Quantization(
            settings.get("group_size", 64), settings.get("bits", 4), settings.get("mode", "affine")
        )

    def leftovers(self) -> list[str]:
        return sorted(name for name in self._tensors if not name.endswith("rotary_emb.inv_freq"))
