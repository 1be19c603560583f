"""Every family computes what mlx-lm computes, however the work is cut up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import ernie4_5_moe

from emlxd.graph.attention import Place
from emlxd.graph.checkpoint import open_checkpoint
from emlxd.graph.device import Device, current_device
from emlxd.graph.family_table import FAMILIES
from emlxd.graph.kv_cache import KVCache
from emlxd.graph.loader import load_transformer
from emlxd.graph.recurrent_families import RECURRENT
from emlxd.graph.runner import MlxRunner
from emlxd.graph.transformer import Transformer
from tests import device
from tests.agreement import assert_greedy, close, oracle_logits
from tests.device import only_on_cpu
from tests.graph import tiny
from tests.graph.test_parity import generate
from tests.graph.tiny_families import CONFIGS, oracle_of

CONTEXT = 128
PROMPT = [(7 * i * i + 3 * i) % 160 for i in range(70)]
NEW_TOKENS = 32
KINDS = ["cpu", "metal"] if device.current() == "cpu" else [current_device().kind]
"""What a GPU computes in its own way MLX computes on a CPU too."""


class Corrected(ernie4_5_moe.Ernie4_5_MoeMLP):  # type: ignore[misc]
    """ERNIE's experts with the bias that mlx-lm leaves out, as in transformers' Ernie4_5_MoeTopKRouter."""

    def __call__(self, x: mx.array) -> mx.array:
        scores = mx.softmax(self.gate(x).astype(mx.float32), axis=-1)
        chosen = mx.argsort(-(scores + self.bias.squeeze()), axis=-1)[..., : self.k]
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        weights = weights / mx.maximum(weights.sum(axis=-1, keepdims=True), 1e-12)
        return (self.switch_mlp(x, chosen) * weights[..., None]).sum(axis=-2) + self.shared_experts(x)


@pytest.mark.numeric
@pytest.mark.parametrize("module", ["mlp.moe_statics", "mlp.gate.moe_statics"])
def test_ernie_chooses_experts_with_their_correction(tmp_path: Path, module: str) -> None:
    oracle, config = oracle_of("ernie4_5_moe")
    plain = oracle_logits(oracle, PROMPT)
    biases = {}
    for number, layer in enumerate(oracle.layers):
        if hasattr(layer.mlp, "switch_mlp"):
            bias = mx.random.normal((1, 6)) * 0.3
            biases[f"model.layers.{number}.{module}.e_score_correction_bias"] = bias
    folder = tiny.save(tmp_path, oracle, config, **biases)
    for number, layer in enumerate(oracle.layers):
        if (bias := biases.get(f"model.layers.{number}.{module}.e_score_correction_bias")) is not None:
            layer.mlp.__class__, layer.mlp.bias = Corrected, bias
    expected = oracle_logits(oracle, PROMPT)
    model = load_transformer(open_checkpoint(folder), current_device(), max_context=CONTEXT, dtype="float32")
    assert_prefill_agrees(model, expected)
    assert not close(plain, expected)


GEMMA_4 = {
    "dense": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "with experts": {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "of usual width": {"use_double_wide_mlp": False, "num_kv_shared_layers": 2},
}


@pytest.mark.numeric
@pytest.mark.parametrize("variant", GEMMA_4)
def test_sizes_of_gemma_4(tmp_path: Path, variant: str) -> None:
    """The larger ones have values that are keys, and neither inputs of layers nor layers that borrow."""
    large = {} if "width" in variant else {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    oracle, config = oracle_of("gemma4_text", **large, **GEMMA_4[variant])
    folder = tiny.save(tmp_path, oracle, config)
    model = load_transformer(open_checkpoint(folder), current_device(), max_context=CONTEXT, dtype="float32")
    assert_prefill_agrees(model, oracle_logits(oracle, PROMPT))
    assert_decode_agrees(model, oracle)


@pytest.mark.numeric
def test_gemma_4_as_it_was_published(tmp_path: Path) -> None:
    """Its gates and linear parts are joined, and layers that borrow have keys and values all the same."""
    oracle, config = oracle_of("gemma4_text", **GEMMA_4["with experts"])
    tensors = dict(tree_flatten(oracle.parameters()))
    for number in range(6):
        stem = f"model.layers.{number}.experts"
        parts = [tensors.pop(f"{stem}.switch_glu.{name}_proj.weight") for name in ("gate", "up", "down")]
        tensors |= {f"{stem}.gate_up_proj": mx.concatenate(parts[:2], axis=1), f"{stem}.down_proj": parts[2]}
        tensors[f"model.layers.{number}.self_attn.q_proj.input_max"] = mx.zeros((1,))
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.5.self_attn.{name}.weight"] = mx.zeros((4, 4))
    tensors = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}
    tensors["model.vision_tower.weight"] = mx.zeros((2,))
    assert_folder_agrees(tmp_path, tensors, oracle, {"model_type": "gemma4", "text_config": config})


def test_every_family_has_a_row() -> None:
    assert set(CONFIGS) == set(FAMILIES)


@pytest.mark.numeric
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_family_computes_what_mlx_lm_computes(tmp_path: Path, family: str, kind: Any) -> None:
    oracle, config = oracle_of(family)
    checkpoint = open_checkpoint(tiny.save(tmp_path, oracle, config, shards=2))
    model = load_transformer(checkpoint, Device(kind), max_context=CONTEXT, dtype="float32")
    assert_prefill_agrees(model, oracle_logits(oracle, PROMPT))
    assert_decode_agrees(model, oracle)


NOT_IN_HALVES = {family for family, config in CONFIGS.items() if any("experts" in key for key in config)}
"""MLX has no products with chosen experts in 16 bits on a CPU."""

MORE_EXACT = {"lfm2", "qwen3_5"}
"""Recurrences are summed up in float32 here, whatever the dtype."""

LESS_EXACT = {"phi", "stablelm", "youtu_llm"}
"""mlx-lm computes attention in float32, and the last one's on keys and values that it has expanded."""


@only_on_cpu("a GPU's kernels depend on sizes, and mlx-lm's own answers on the rows beside them")
@pytest.mark.numeric
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", sorted(set(CONFIGS) - NOT_IN_HALVES - MORE_EXACT - LESS_EXACT))
def test_bfloat16_is_rounded_where_mlx_lm_rounds(tmp_path: Path, family: str, kind: Any) -> None:
    """Bit by bit: two tokens are often a rounding apart, and which is likelier decides on the text."""
    oracle, config = oracle_of(family)
    oracle.update(tree_map(lambda array: array.astype(mx.bfloat16), oracle.parameters()))
    checkpoint = open_checkpoint(tiny.save(tmp_path, oracle, config))
    model = load_transformer(checkpoint, Device(kind), max_context=CONTEXT, dtype="bfloat16")
    tokens, length = mx.array([PROMPT]), len(PROMPT)
    place = Place(slice(0, 1), mx.array([0]), length, length)
    hidden = model.forward(tokens, place, KVCache(model.spec, 1, CONTEXT, model.dtype).layers)
    assert hidden.dtype == mx.bfloat16
    assert mx.array_equal(model.logits(hidden), oracle(tokens).astype(mx.float32))


MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "intermediate_size": 0,
}


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("family", "changes"),
    [("lfm2", {}), ("lfm2_moe", {}), ("qwen3_next", {}), ("qwen3_5", {}), ("qwen3_5", MOE)],
)
def test_a_folder_as_it_was_published_is_the_one_that_mlx_lm_makes_of_it(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    oracle, config = oracle_of(family, **changes)
    tensors = {"mtp.fc.weight": mx.zeros((4, 4))} if family.startswith("qwen") else {}
    for name, tensor in tree_flatten(oracle.parameters()):
        tensors |= published(family, name, tensor)
    if family == "qwen3_5":
        join_experts(tensors)
    assert_folder_agrees(tmp_path, tensors, oracle, config)


@pytest.mark.numeric
@pytest.mark.parametrize("family", RECURRENT)
def test_a_quantised_folder_of_a_recurrent_family(tmp_path: Path, family: str) -> None:
    """Projections whose rows are put in another order are quantised too."""
    whole_groups = {"shared_expert_intermediate_size": 64, "shared_intermediate_size": 64, "mamba_d_head": 16}
    oracle, config = oracle_of(family, **whole_groups)
    quantised = tiny.quantize(oracle, config, bits=8)
    checkpoint = open_checkpoint(tiny.save(tmp_path, oracle, quantised))
    model = load_transformer(
        checkpoint, current_device(), max_context=CONTEXT, dtype="float32", weights="keep"
    )
    assert any(array.dtype == mx.uint32 for array in model.arrays())
    assert_prefill_agrees(model, oracle_logits(oracle, PROMPT))


def published(family: str, name: str, tensor: mx.array) -> dict[str, mx.array]:
    """A tensor as it was before mlx-lm's conversion."""
    name = name.replace("language_model.model.", "model.language_model.")
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return {name: tensor.swapaxes(1, 2)}
    if family.startswith("qwen") and name.endswith("norm.weight") and "linear_attn" not in name:
        return {name: tensor - 1}
    if family == "lfm2_moe":
        for own, other in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            name = name.replace(own, other)
        if "switch_mlp" in name:
            return {name.replace("switch_mlp", f"experts.{n}"): one for n, one in enumerate(tensor)}
    return {name: tensor}


def join_experts(tensors: dict[str, mx.array]) -> None:
    """The gates and linear parts of all experts in one tensor, as Qwen 3.5 has them."""
    for prefix in {name.partition("switch_mlp")[0] for name in tensors if "switch_mlp" in name}:
        gate, up, down = (tensors.pop(f"{prefix}switch_mlp.{n}_proj.weight") for n in ("gate", "up", "down"))
        tensors[f"{prefix}experts.gate_up_proj"] = mx.concatenate([gate, up], axis=1)
        tensors[f"{prefix}experts.down_proj"] = down


@pytest.mark.numeric
def test_granite_without_experts_as_it_was_published(tmp_path: Path) -> None:
    oracle, config = oracle_of("granitemoehybrid", num_local_experts=0)
    tensors = dict(tree_flatten(oracle.parameters()))
    for layer in (f"model.layers.{number}" for number in range(3)):
        parts = [tensors.pop(f"{layer}.mlp.{part}_proj.weight") for part in ("gate", "up", "down")]
        tensors[f"{layer}.shared_mlp.input_linear.weight"] = mx.concatenate(parts[:2])
        tensors[f"{layer}.shared_mlp.output_linear.weight"] = parts[2]
    assert_folder_agrees(tmp_path, tensors, oracle, config)


def assert_folder_agrees(
    folder: Path, tensors: dict[str, mx.array], oracle: Any, config: dict[str, Any]
) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    model = load_transformer(open_checkpoint(folder), current_device(), max_context=CONTEXT, dtype="float32")
    assert_prefill_agrees(model, oracle_logits(oracle, PROMPT))


def assert_prefill_agrees(model: Transformer, expected: mx.array) -> None:
    """Whole, in chunks, and side by side with rows of other lengths."""
    cache = KVCache(model.spec, 3, CONTEXT, model.dtype)

    def logits(slots: Sequence[int], starts: Sequence[int], rows: Sequence[list[int]]) -> mx.array:
        length = max(len(row) for row in rows)
        lengths = mx.array([len(row) for row in rows])
        place = Place(mx.array(slots), mx.array(starts), length, CONTEXT, lengths)
        tokens = mx.array([row + [0] * (length - len(row)) for row in rows])
        return model.logits(model.forward(tokens, place, cache.layers))

    assert close(logits([1], [0], [PROMPT])[0], expected)
    for start in range(0, 40, 16):
        piece = PROMPT[start : min(start + 16, 40)]
        assert close(logits([2], [start], [piece])[0], expected[start : start + len(piece)])
    rows = logits([2, 0], [40, 0], [PROMPT[40:60], PROMPT[:9]])
    assert close(rows[0], expected[40:60])
    assert close(rows[1, :9], expected[:9])
    rows = logits([2, 0], [60, 9], [PROMPT[60:], PROMPT[9:44]])
    assert close(rows[0, :10], expected[60:])
    assert close(rows[1], expected[9:44])


def assert_decode_agrees(model: Transformer, oracle: Any) -> None:
    """Three ragged rows together; when the first has ended, the last goes on in its slot."""
    runner = MlxRunner(model, slots=4, max_context=CONTEXT, compile=True)
    prompts = [PROMPT[:23], PROMPT[5:66], PROMPT[30:70]]
    half = NEW_TOKENS // 2
    got = generate(runner, dict(enumerate(prompts)), half, chunk=32)
    runner.move(2, 0, len(prompts[2]) + half)
    for step in range(half, NEW_TOKENS):
        positions = [len(prompts[2]) + step - 1, len(prompts[1]) + step - 1]
        for slot, token in zip((2, 1), runner.decode(positions).read().tokens, strict=True):
            got[slot].append(token)
    assert [len(got[slot]) for slot in range(3)] == [half, NEW_TOKENS, NEW_TOKENS]
    for slot, prompt in enumerate(prompts):
        assert_greedy(oracle, prompt, got[slot])
    assert runner.traces == 2
