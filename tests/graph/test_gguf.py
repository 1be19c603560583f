"""GGUF files: block formats against the ``gguf`` package, whole models against mlx-lm, and damaged files."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.quants import dequantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from emlxd.errors import ModelFormatError
from emlxd.graph.attention import Place
from emlxd.graph.checkpoint import open_checkpoint
from emlxd.graph.device import current_device
from emlxd.graph.gguf import BLOCK_TYPES, GgufFile, TensorInfo
from emlxd.graph.gguf_blocks import KEPT_BITS, from_gguf
from emlxd.graph.kv_cache import KVCache
from emlxd.graph.loader import load_transformer
from emlxd.graph.weights import Quantization
from tests.agreement import close, oracle_logits
from tests.graph import tiny
from tests.graph.tiny_families import BASE, YARN

ROWS = 6
PROMPT = [(7 * i * i + 3 * i) % 160 for i in range(40)]
PLAIN = {"F32", "F16", "BF16"}
HALF_AT = {  # where a block of the type keeps 16-bit floats
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
    "IQ1_S": [0], "IQ1_M": [], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0],
    "MXFP4": [], "TQ1_0": [52], "TQ2_0": [64],
}  # fmt: skip


def random_blocks(name: str) -> tuple[TensorInfo, bytes, np.ndarray[Any, Any]]:
    """A tensor of 6 x 512 in random blocks, and its values."""
    kind = next(number for number, block in BLOCK_TYPES.items() if block.name == name)
    block = BLOCK_TYPES[kind]
    rng = np.random.default_rng(kind)
    raw = rng.integers(0, 256, (ROWS, 512 // block.weights, block.bytes), dtype=np.uint8)
    for at in HALF_AT[name]:
        scales = rng.uniform(-1, 1, raw.shape[:2]).astype(np.float16)
        raw[..., at : at + 2] = scales[..., None].view(np.uint8)
    if name == "IQ1_M":  # whose float is spread over four words
        raw[..., 55] &= 0x3F
    if name == "MXFP4":  # an exponent, of which few make floats that add up
        raw[..., 0] = 120 + raw[..., 0] % 16
    raw = raw.reshape(ROWS, -1)
    info = TensorInfo("t", (ROWS, 512), block, 0, raw.size)
    return info, raw.tobytes(), dequantize(raw, gguf.GGMLQuantizationType(kind))


@pytest.mark.numeric
@pytest.mark.parametrize(
    "name", sorted(block.name for block in BLOCK_TYPES.values() if block.name not in PLAIN)
)
def test_blocks_become_the_values_that_the_gguf_package_reads(name: str) -> None:
    info, raw, expected = random_blocks(name)
    largest = np.abs(expected).max()
    dense = np.array(from_gguf(info, raw, mx.float32).data)
    np.testing.assert_allclose(dense, expected, rtol=1e-6, atol=1e-6 * largest)
    kept = from_gguf(info, raw)
    mode = "mxfp4" if name == "MXFP4" else "affine"
    assert kept.quantization == Quantization(32, KEPT_BITS[name], mode)
    exact = name not in (
        "Q2_K",
        "Q3_K",
        "Q6_K",
        "IQ1_M",
        "IQ2_XS",
        "IQ2_S",
    )  # groups of 16, which MLX has not
    np.testing.assert_allclose(
        np.array(kept.dense(mx.float32).data), expected, atol=(2e-3 if exact else 1e-2) * largest
    )


Write = Callable[[gguf.GGUFWriter, dict[str, Any]], None]


def usual_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])


def permuted(name: str, array: np.ndarray[Any, Any], config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """llama.cpp's order of the rows of q and k."""
    for part, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if part in name:
            heads = config[key]
            return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return array


def gemma_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_sliding_window(config["sliding_window"])
    if "attn_logit_softcapping" in config:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def phi_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    writer.add_rope_dimension_count(config["head_dim"])
    for kind in ("long", "short"):
        factors = np.array(config["rope_scaling"][f"{kind}_factor"], dtype=np.float32)
        writer.add_tensor(f"rope_factors_{kind}.weight", factors)


GEMMA2: dict[str, Any] = {
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 9.0,
    "sliding_window": 64,
    "tie_word_embeddings": True,
}
GEMMA3: dict[str, Any] = {
    "query_pre_attn_scalar": 16,
    "sliding_window": 16,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "num_hidden_layers": 6,
}
PHI3: dict[str, Any] = {
    "original_max_position_embeddings": 64,
    "rope_scaling": {
        "type": "longrope",
        "long_factor": [1.0 + 0.3 * i for i in range(8)],
        "short_factor": [1.0] * 8,
    },
}


def expert_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
PLAIN_ENDS = ("gate.weight", "router.weight", "bias")
EXPERT_NAMES = {
    "mlp.gate.": "ffn_gate_inp.",
    "block_sparse_moe.gate.": "ffn_gate_inp.",
    "mlp.switch_mlp.gate_proj": "ffn_gate_exps",
    "mlp.switch_mlp.up_proj": "ffn_up_exps",
    "mlp.switch_mlp.down_proj": "ffn_down_exps",
    "block_sparse_moe.switch_mlp.gate_proj": "ffn_gate_exps",
    "block_sparse_moe.switch_mlp.up_proj": "ffn_up_exps",
    "block_sparse_moe.switch_mlp.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}


def gpt_oss_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    expert_keys(writer, config)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    writer.add_rope_scaling_orig_ctx_len(config["rope_scaling"]["original_max_position_embeddings"])


GPT_OSS: dict[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "rope_scaling": YARN | {"factor": 8.0},
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GPT_OSS_NAMES = {
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "self_attn.sinks": "attn_sinks.weight",
    "post_attention_layernorm": "post_attention_norm",
}
# GGUF architecture -> mlx-lm's module, what differs from the usual config.json, further keys, and names
CASES: dict[str, tuple[str, dict[str, Any], Write, dict[str, str]]] = {
    "llama": ("llama", {}, lambda *_: None, {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, lambda *_: None, {}),
    "qwen3": ("qwen3", {}, lambda *_: None, {}),
    "llama with experts": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        expert_keys,
        EXPERT_NAMES,
    ),
    "qwen2moe": (
        "qwen2_moe",
        EXPERTS | {"shared_expert_intermediate_size": 64},
        expert_keys,
        EXPERT_NAMES,
    ),
    "qwen3moe": (
        "qwen3_moe",
        EXPERTS | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        expert_keys,
        EXPERT_NAMES,
    ),
    "gpt-oss": ("gpt_oss", GPT_OSS, gpt_oss_keys, GPT_OSS_NAMES),
    "gemma2": ("gemma2", GEMMA2, gemma_keys, {"post_attention_layernorm": "post_attention_norm"}),
    "gemma3": ("gemma3_text", GEMMA3, gemma_keys, {"post_attention_layernorm": "post_attention_norm"}),
    "phi3": ("phi3", PHI3, phi_keys, {"mlp.gate_up_proj": "ffn_up", "self_attn.qkv_proj": "attn_qkv"}),
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, architecture: str) -> Any:
    """A tiny model as llama.cpp's converter writes it, matrices in Q8_0; mlx-lm's model of the same."""
    kind, changes, write, names = CASES[architecture]
    architecture = architecture.split()[0]
    config = {"model_type": kind} | BASE | changes
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tiny.random_parameters(model))
    if config["tie_word_embeddings"] and "lm_head" in model:
        model.sanitize({})
    writer = gguf.GGUFWriter(str(path), architecture)
    usual_keys(writer, config)
    write(writer, config)
    rounded = []
    for name, array in tree_flatten(model.parameters()):
        stored = np.array(array)
        if stored.ndim > 1 and not name.endswith(PLAIN_ENDS):
            blocks = gguf.quants.quantize(stored, gguf.GGMLQuantizationType.Q8_0)
            stored = dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
        rounded.append((name, mx.array(stored)))
        add_tensor(writer, architecture, name, stored, config, NAMES | names)
    model.load_weights(rounded)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def add_tensor(
    writer: gguf.GGUFWriter,
    architecture: str,
    name: str,
    array: np.ndarray[Any, Any],
    config: dict[str, Any],
    names: dict[str, str],
) -> None:
    if architecture == "llama":
        array = permuted(name, array, config)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        array = array + 1
    names = {"post_attention_layernorm": "ffn_norm"} | names
    for own in sorted(names, key=len, reverse=True):
        name = name.replace(own, names[own])
    if "gate_inp" in name:  # small, and llama.cpp keeps it as it is; that of a shared expert is a vector
        array = array.squeeze()
    if array.ndim == 1 or "gate_inp" in name or name.endswith("bias"):
        writer.add_tensor(name, array)
        return
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)


@pytest.mark.numeric
@pytest.mark.parametrize("architecture", CASES)
def test_a_gguf_file_computes_what_mlx_lm_computes(tmp_path: Path, architecture: str) -> None:
    oracle = write_gguf(tmp_path / "tiny.gguf", architecture)
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    model = load_transformer(checkpoint, current_device(), max_context=128, dtype="float32")
    cache = KVCache(model.spec, 1, 128, model.dtype)
    place = Place(slice(0, 1), mx.array([0]), len(PROMPT), 128)
    logits = model.logits(model.forward(mx.array([PROMPT]), place, cache.layers))
    expected = oracle_logits(oracle, PROMPT)
    # Where Q8_0 is kept, its scales are rounded to 16 bits.
    own = 2e-3 * float(mx.abs(expected).max())
    assert close(logits[0], expected, on_cpu=own)


def test_an_architecture_without_a_row_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ModelFormatError, match=r"'mamba' is not supported in GGUF files, supported are: gemma"
    ):
        open_checkpoint(tmp_path / "x.gguf")


@pytest.mark.parametrize("shape", [(0, 4), (2**47, 0), (0,)])
def test_a_shape_without_room_is_named(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """No bytes in all, so the file is long enough for any of them."""
    sizes = b"".join(struct.pack("<Q", size) for size in shape)
    tensor = struct.pack("<Q", 1) + b"t" + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", 0, 0)
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor + bytes(64))
    with pytest.raises(ModelFormatError, match="tensor 't' has the shape"):
        GgufFile(path)


@pytest.fixture(scope="module")
def good_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """Header and tensors."""
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    write_gguf(path, "qwen3")
    data = path.read_bytes()
    start = min(info.offset for info in GgufFile(path).tensors.values())
    return data[:start], data[start:]


def read_all(path: Path) -> None:
    """What loading does with a file, but for the arithmetic."""
    checkpoint = open_checkpoint(path)
    load_transformer(checkpoint, current_device(), max_context=64, dtype="float32")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_a_format_error(
    tmp_path: Path, good_file: tuple[bytes, bytes], data: st.DataObject
) -> None:
    header = bytearray(good_file[0])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(header) - 1))
        header[at] = data.draw(st.integers(0, 255))
    whole = bytes(header) + good_file[1]
    path = tmp_path / "bad.gguf"
    path.write_bytes(whole[: data.draw(st.sampled_from([len(whole), len(header), len(header) // 2, 7, 0]))])
    try:
        read_all(path)
    except ModelFormatError as error:
        assert str(path) in str(error)
