"""The default model in other formats: the same weights, half precision, written as people publish them."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

import gguf
import mlx.core as mx
import numpy as np
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from emlxd.graph.gguf import GgufFile
from emlxd.graph.gguf_checkpoint import GgufCheckpoint

Kind = gguf.GGMLQuantizationType
Floats = NDArray[np.float32]

_FINER: Final = ("attn_v.weight", "ffn_down.weight", "token_embd.weight")
# What the mixtures of llama.cpp give a matrix, by the end of its name; all else gets the first.
MIXTURES: Final[dict[str, tuple[Kind, dict[str, Kind]]]] = {
    "F16": (Kind.F16, {}),
    "Q8_0": (Kind.Q8_0, {}),
    "Q4_1": (Kind.Q4_1, {}),
    "Q6_K": (Kind.Q6_K, {}),
    "Q4_K_M": (
        Kind.Q4_K,
        dict.fromkeys(_FINER, Kind.Q6_K),
    ),
}
# And instead of a K-quant where a row does not divide into its 256 weights.
_NARROW: Final = {Kind.Q4_K: Kind.Q5_0, Kind.Q6_K: Kind.Q8_0}
_FTYPES: Final = {"F16": 1, "Q4_1": 3, "Q8_0": 7, "Q4_K_M": 15, "Q6_K": 18}  # enum llama_ftype


def write_gguf(source: Path, target: Path, mixture: str) -> Path:
    """``source``'s metadata and tensors, matrices rounded to half precision and then as ``mixture`` says."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    usual, special = MIXTURES[mixture]
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
            continue
        kind = next((kind for end, kind in special.items() if tensor.name.endswith(end)), usual)
        if values.shape[-1] % 256:
            kind = _NARROW.get(kind, kind)
        half = values.astype(np.float16)
        if kind == Kind.F16:
            writer.add_tensor(tensor.name, half)
        else:
            encode = _K_QUANTS.get(kind) or (lambda x, kind=kind: quantize(x, kind))
            writer.add_tensor(tensor.name, encode(half.astype(np.float32)), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def write_gguf_with_llama_cpp(source: Path, target: Path, mixture: str) -> Path:
    """``source`` in half precision through llama.cpp's own quantiser."""
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = _FTYPES[mixture], 2
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(options))
    assert status == 0, f"llama.cpp's quantiser ends with {status}"
    return target


def write_folder(source: Path, folder: Path) -> Path:
    """A Hugging Face folder in half precision from a GGUF file in half precision."""
    checkpoint = GgufCheckpoint(GgufFile(source))
    layers, tensors = checkpoint.config["num_hidden_layers"], {}
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    parts += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "attention_in", "mlp_in")
    stems = [f"model.layers.{layer}.{part}" for layer in range(layers) for part in parts]
    for stem in ("model.embed_tokens", "model.norm", *stems):
        weight = checkpoint.take(f"{stem}.weight")
        assert weight is not None
        name = stem.replace("attention_in", "input_layernorm").replace("mlp_in", "post_attention_layernorm")
        tensors[f"{name}.weight"] = weight.data
    assert not checkpoint.leftovers()
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    return folder


def _blocks(values: Floats, size: int) -> Floats:
    """[rows, columns] -> [blocks, groups, size], a block being 256 weights."""
    return values.reshape(-1, 256 // size, size)


def _halves(values: Floats) -> NDArray[np.uint8]:
    """[blocks] -> bytes [blocks, 2] in half precision."""
    return values.astype(np.float16)[:, None].view(np.uint8)


def encode_q4_k(values: Floats) -> NDArray[np.uint8]:
    """Groups of 32: a number of 4 bits times a scale, less a minimum, both 6 bits of the block's largest."""
    groups = _blocks(values, 32)
    lowest = np.minimum(groups.min(axis=-1), 0)
    scales, minima = (groups.max(axis=-1) - lowest) / 15, -lowest
    d, dmin = scales.max(axis=-1) / 63, minima.max(axis=-1) / 63
    factors = np.round(scales / np.maximum(d, 1e-12)[:, None]).astype(np.uint8)
    offsets = np.round(minima / np.maximum(dmin, 1e-12)[:, None]).astype(np.uint8)
    step = np.maximum(d[:, None] * factors, 1e-12)[..., None]
    shifted = groups + (dmin[:, None] * offsets)[..., None]
    numbers = np.clip(np.round(shifted / step), 0, 15).astype(np.uint8)
    packed = np.concatenate(
        [
            factors[:, :4] | (factors[:, 4:] >> 4 << 6),
            offsets[:, :4] | (offsets[:, 4:] >> 4 << 6),
            (factors[:, 4:] & 15) | (offsets[:, 4:] & 15) << 4,
        ],
        axis=-1,
    )
    nibbles = numbers[:, 0::2] | (numbers[:, 1::2] << 4)
    blocks = [_halves(d), _halves(dmin), packed, nibbles.reshape(len(groups), -1)]
    return np.concatenate(blocks, axis=-1).reshape(len(values), -1)


def encode_q6_k(values: Floats) -> NDArray[np.uint8]:
    """Groups of 16: a number of 6 bits less 32, times a scale of 8 bits of the block's largest."""
    groups = _blocks(values, 16)
    scales = np.abs(groups).max(axis=-1) / 31
    d = scales.max(axis=-1) / 127
    factors = np.round(scales / np.maximum(d, 1e-12)[:, None]).astype(np.int8)
    step = np.maximum(d[:, None] * factors, 1e-12)[..., None]
    numbers = (np.clip(np.round(groups / step), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (numbers[:, :, :2] & 15) | (numbers[:, :, 2:] & 15) << 4
    high = (numbers >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(axis=2, dtype=np.uint8)
    count = len(groups)
    blocks = [low.reshape(count, -1), high.reshape(count, -1), factors.view(np.uint8), _halves(d)]
    return np.concatenate(blocks, axis=-1).reshape(len(values), -1)


_K_QUANTS: Final[dict[Kind, Callable[[Floats], NDArray[np.uint8]]]] = {
    Kind.Q4_K: encode_q4_k,
    Kind.Q6_K: encode_q6_k,
}
