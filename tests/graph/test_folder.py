"""Model folders: the layouts and number formats that are published, and files that are not what they seem."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_map

from emlxd.errors import ModelFormatError
from emlxd.graph.attention import Place
from emlxd.graph.checkpoint import open_checkpoint
from emlxd.graph.device import current_device
from emlxd.graph.families import spec_of
from emlxd.graph.kv_cache import KVCache
from emlxd.graph.loader import load_transformer
from emlxd.graph.recurrent_families import RECURRENT
from emlxd.graph.self_attention import SelfAttention
from emlxd.graph.transformer import Transformer
from emlxd.graph.weights import Quantization
from tests.agreement import close, oracle_logits
from tests.graph.tiny_families import BASE, CONFIGS, config_of, oracle_of

PROMPT = [(7 * i * i + 3 * i) % 160 for i in range(30)]
Tensors = dict[str, mx.array]
EXPERTS = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")


def save(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def load(folder: Path, **options: Any) -> Transformer:
    options = {"max_context": 128, "dtype": "float32"} | options
    return load_transformer(open_checkpoint(folder), current_device(), **options)


def logits_of(model: Transformer) -> mx.array:
    cache = KVCache(model.spec, 1, 64, model.dtype)
    place = Place(slice(0, 1), mx.array([0]), len(PROMPT), 64)
    return model.logits(model.forward(mx.array([PROMPT]), place, cache.layers))[0]


def agrees(model: Transformer, oracle: Any, dtype: mx.Dtype = mx.float32) -> bool:
    return close(logits_of(model), oracle_logits(oracle, PROMPT), dtype=dtype)


def tensors_of(oracle: Any) -> Tensors:
    return dict(tree_flatten(oracle.parameters()))


@pytest.mark.numeric
@pytest.mark.parametrize("weights", ["keep", "dense"])
@pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [("affine", bits, 32) for bits in (2, 3, 4, 5, 6, 8)]
    + [("affine", 4, 64), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)],
)
def test_every_quantised_format_of_mlx(
    tmp_path: Path, mode: str, bits: int, group_size: int, weights: str
) -> None:
    # Wider than a group: MLX's product for CUDA is wrong where one group is all of a row.
    oracle, config = oracle_of("qwen3_moe", hidden_size=2 * max(group_size, 32))
    own = {"group_size": 32, "bits": 8, "mode": "affine"}

    def settings_of(path: str, module: nn.Module) -> bool | dict[str, Any]:
        fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0
        return fits and (own if path.endswith("o_proj") else True)

    nn.quantize(oracle, group_size, bits, mode=mode, class_predicate=settings_of)
    overrides = {f"model.layers.{index}.self_attn.o_proj": own for index in range(3)}
    quantization = {"group_size": group_size, "bits": bits, "mode": mode, **overrides}
    folder = save(tmp_path, tensors_of(oracle), config | {"quantization": quantization})
    assert agrees(load(folder, weights=weights), oracle)


@pytest.mark.numeric
def test_dense_weights_are_quantised_on_load(tmp_path: Path) -> None:
    oracle, config = oracle_of("llama")
    folder = save(tmp_path, tensors_of(oracle), config)
    model = load(folder, quantize=Quantization(32, 4))
    nn.quantize(oracle, 32, 4)
    assert agrees(model, oracle)
    mixer = model.layers[0].mixer
    assert isinstance(mixer, SelfAttention)
    assert mixer.out.weight.quantization == Quantization(32, 4)


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_folders(tmp_path: Path, dtype: mx.Dtype) -> None:
    oracle, config = oracle_of("llama")
    halves = {name: array.astype(dtype) for name, array in tensors_of(oracle).items()}
    oracle.load_weights([(name, array.astype(mx.float32)) for name, array in halves.items()])
    assert agrees(load(save(tmp_path, halves, config)), oracle)


@pytest.mark.numeric
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "glm4", "lfm2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_models_computed_in_half_precision(tmp_path: Path, family: str, dtype: str) -> None:
    """Beside mlx-lm's with the same weights, computed in float32."""
    oracle, config = oracle_of(family)
    kind = getattr(mx, dtype)
    oracle.update(tree_map(lambda array: array.astype(kind).astype(mx.float32), oracle.parameters()))
    folder = save(tmp_path, tensors_of(oracle), config)
    assert agrees(load(folder, dtype=dtype), oracle, kind)


@pytest.mark.numeric
def test_fp8_with_a_scale_for_each_block(tmp_path: Path) -> None:
    oracle, config = oracle_of("qwen3")
    tensors, rounded = tensors_of(oracle), []
    for name, array in list(tensors.items()):
        if "_proj" in name:
            scale = mx.abs(array).max() / 400
            tensors[name] = mx.to_fp8(array / scale)
            tensors[f"{name}_scale_inv"] = mx.full((1, 1), scale)
            array = (mx.from_fp8(tensors[name], dtype=mx.float32) * scale).astype(mx.bfloat16)
        rounded.append((name, array.astype(mx.float32)))
    oracle.load_weights(rounded)
    assert agrees(load(save(tmp_path, tensors, config)), oracle)


def unstacked(tensors: Tensors, stacked: str, each: str, names: dict[str, str]) -> Tensors:
    """Hugging Face's layout, where every expert is a module of its own."""
    found: Tensors = {}
    for name, array in tensors.items():
        prefix, _, rest = name.partition(f".{stacked}.")
        if not rest:
            found[name] = array
            continue
        projection, _, kind = rest.rpartition(".")
        for index, part in enumerate(array):
            found[f"{prefix}.{each}.{index}.{names.get(projection, projection)}.{kind}"] = part
    return found


def mixtral_of_hugging_face(tensors: Tensors) -> Tensors:
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    return unstacked(tensors, "block_sparse_moe.switch_mlp", "block_sparse_moe.experts", names)


def qwen_of_hugging_face(tensors: Tensors) -> Tensors:
    return unstacked(tensors, "mlp.switch_mlp", "mlp.experts", {})


def granite_of_hugging_face(tensors: Tensors) -> Tensors:
    found = {name: array for name, array in tensors.items() if "switch_mlp" not in name}
    for index in range(3):
        prefix = f"model.layers.{index}.block_sparse_moe"
        gate, up, down = (
            tensors[f"{prefix}.switch_mlp.{part}.weight"] for part in ("gate_proj", "up_proj", "down_proj")
        )
        found[f"{prefix}.input_linear.weight"] = mx.concatenate([gate, up], axis=1)
        found[f"{prefix}.output_linear.weight"] = down
    return found


def deepseek_of_hugging_face(tensors: Tensors) -> Tensors:
    found = qwen_of_hugging_face(tensors)
    for index in range(3):
        prefix = f"model.layers.{index}.self_attn"
        key_up, value_up = (found.pop(f"{prefix}.{part}.weight") for part in ("embed_q", "unembed_out"))
        both = mx.concatenate([key_up.swapaxes(-1, -2), value_up], axis=1)
        found[f"{prefix}.kv_b_proj.weight"] = both.flatten(0, 1)
    found["model.layers.3.enorm.weight"] = mx.zeros((4,))  # of the layer that guesses further tokens
    return found


def gpt_oss_of_hugging_face(tensors: Tensors) -> Tensors:
    """Experts in mxfp4, rows of the gate and the linear part by turns."""
    found = {name: array for name, array in tensors.items() if ".mlp.experts." not in name}
    for index in range(3):
        prefix = f"model.layers.{index}.mlp.experts"
        parts = {
            part: tuple(tensors[f"{prefix}.{part}.{kind}"] for kind in ("weight", "scales", "bias"))
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        fused = [
            mx.stack([gate, up], axis=2).flatten(1, 2)
            for gate, up in zip(parts["gate_proj"], parts["up_proj"], strict=True)
        ]
        for name, (weight, scales, bias) in (("gate_up_proj", fused), ("down_proj", parts["down_proj"])):
            found[f"{prefix}.{name}_blocks"] = weight.view(mx.uint8).reshape(*scales.shape, 16)
            found[f"{prefix}.{name}_scales"] = scales
            found[f"{prefix}.{name}_bias"] = bias
    return found


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("family", "published"),
    [
        ("mixtral", mixtral_of_hugging_face),
        ("phimoe", mixtral_of_hugging_face),
        ("qwen2_moe", qwen_of_hugging_face),
        ("glm4_moe", qwen_of_hugging_face),
        ("ernie4_5_moe", qwen_of_hugging_face),
        ("granitemoe", granite_of_hugging_face),
        ("deepseek_v3", deepseek_of_hugging_face),
    ],
)
def test_layouts_of_hugging_face(tmp_path: Path, family: str, published: Any) -> None:
    oracle, config = oracle_of(family)
    folder = save(tmp_path, published(tensors_of(oracle)), config)
    assert agrees(load(folder), oracle)


@pytest.mark.numeric
def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    oracle, config = oracle_of("gpt_oss")
    nn.quantize(oracle, 32, 4, mode="mxfp4", class_predicate=lambda path, _: path.endswith(EXPERTS))
    folder = save(tmp_path, gpt_oss_of_hugging_face(tensors_of(oracle)), config)
    for weights in ("keep", "dense"):
        assert agrees(load(folder, weights=weights), oracle)


@pytest.mark.numeric
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_model_that_sees(tmp_path: Path, prefix: str) -> None:
    oracle, config = oracle_of("gemma3_text")
    tensors = {name.replace("model.", prefix, 1): array for name, array in tensors_of(oracle).items()}
    tensors["vision_tower.embeddings.weight"] = mx.zeros((2, 2))
    folder = save(tmp_path, tensors, {"model_type": "gemma3", "text_config": config})
    assert agrees(load(folder), oracle)


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("outer", "family"),
    [("qwen2_5_vl", "qwen2"), ("qwen3_vl", "qwen3"), ("qwen3_vl_moe", "qwen3_moe"), ("mistral3", "mistral")],
)
@pytest.mark.parametrize("nested", [True, False])
def test_models_that_see_by_their_own_names(tmp_path: Path, outer: str, family: str, nested: bool) -> None:
    """With the text part's config in ``text_config`` and its tensors renamed, or neither."""
    oracle, config = oracle_of(family)
    config |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    tensors = tensors_of(oracle) | {"visual.blocks.0.weight": mx.zeros((2, 2))}
    if nested:
        tensors = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}
        config = {"text_config": config | {"model_type": f"{outer}_text"} if "qwen" in outer else config}
    assert agrees(load(save(tmp_path, tensors, config | {"model_type": outer})), oracle)


@pytest.mark.numeric
def test_quantisation_of_one_layer_in_a_model_that_sees(tmp_path: Path) -> None:
    """mlx-lm's converter names it as its own tensors, the larger model's name included."""
    oracle, config = oracle_of("qwen3_moe")
    own = {"group_size": 32, "bits": 8}
    nn.quantize(oracle, 32, 4, class_predicate=lambda path, module: _settings(path, module, own))
    tensors = {f"language_model.{name}": array for name, array in tensors_of(oracle).items()}
    routers = {f"language_model.model.layers.{index}.mlp.gate": own for index in range(3)}
    quantization = {"group_size": 32, "bits": 4, **routers}
    outer = {"model_type": "qwen3_vl_moe", "text_config": config, "quantization": quantization}
    assert agrees(load(save(tmp_path, tensors, outer)), oracle)


def _settings(path: str, module: nn.Module, router: dict[str, int]) -> bool | dict[str, int]:
    return hasattr(module, "to_quantized") and (router if path.endswith("mlp.gate") else True)


def test_missing_and_leftover_tensors_are_listed(tmp_path: Path) -> None:
    oracle, config = oracle_of("llama")
    tensors = tensors_of(oracle)
    missing = ["model.layers.0.mlp.up_proj.weight", "model.layers.2.input_layernorm.weight"]
    some = {name: array for name, array in tensors.items() if name not in missing}
    with pytest.raises(ModelFormatError, match="lacks tensors of its architecture: " + ", ".join(missing)):
        load(save(tmp_path / "missing", some, config))
    with pytest.raises(ModelFormatError, match=r"does not use: model\.layers\.1\.self_attn\.extra"):
        load(save(tmp_path / "more", tensors | {"model.layers.1.self_attn.extra": mx.zeros((2,))}, config))
    with pytest.raises(
        ModelFormatError, match=r"'model\.norm\.weight' has the shape \(3,\), expected \(64,\)"
    ):
        load(save(tmp_path / "shape", tensors | {"model.norm.weight": mx.zeros((3,))}, config))


def test_an_unknown_architecture_is_named_beside_the_known(tmp_path: Path) -> None:
    with pytest.raises(
        ModelFormatError, match=r"'mamba' is not supported, supported are: afmoe, .* youtu_llm"
    ):
        open_checkpoint(save(tmp_path, {"a": mx.zeros((1,))}, {"model_type": "mamba"}))


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    oracle, config = oracle_of("llama")
    return save(tmp_path_factory.mktemp("folder"), tensors_of(oracle), config)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_safetensors_header_is_a_format_error(
    tmp_path: Path, good_folder: Path, data: st.DataObject
) -> None:
    tensors = (good_folder / "model.safetensors").read_bytes()
    damaged = bytearray(tensors)
    header = 8 + int.from_bytes(tensors[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.sampled_from([len(tensors), len(tensors) - 1, header, header // 2, 7, 0]))
    (tmp_path / "config.json").write_bytes((good_folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(damaged[:length])
    try:
        mx.eval(load(tmp_path).arrays())
    except ModelFormatError as error:
        assert str(tmp_path) in str(error)


ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "U8", "F64", "Q4", 3]),
        "shape": st.lists(st.integers(-3, 2**62) | st.integers(0, 4), max_size=3),
        "data_offsets": st.lists(st.integers(-3, 2**62) | st.integers(0, 64), min_size=1, max_size=3),
    },
    optional={"more": st.none()},
)
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=2)
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), ENTRIES | JSON) | JSON)
def test_a_hostile_safetensors_header_is_a_format_error(tmp_path: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelFormatError, match=str(tmp_path)):
        load(tmp_path)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
SCALING = st.fixed_dictionaries(
    {"type": st.sampled_from(["yarn", "linear", "llama3", "longrope", "none"]), "factor": SCALARS},
    optional={"original_max_position_embeddings": SCALARS},
)
KEYS = [*BASE, "model_type", "rope_scaling", "rope_parameters", "layer_types", "quantization", "text_config"]


@settings(max_examples=300, deadline=None)
@given(
    pair=st.sampled_from([(family, key) for family in RECURRENT for key in CONFIGS[family]]),
    value=SCALARS | st.lists(SCALARS, max_size=3),
)
def test_a_hostile_config_of_a_recurrent_family_is_a_format_error(pair: tuple[str, str], value: Any) -> None:
    family, key = pair
    config = config_of(family)
    config = config.get("text_config", config) | {key: value}
    with contextlib.suppress(ModelFormatError):
        spec = spec_of(config, "folder")
        shapes = [one.shape for layer in spec.layers for one in spec.kept(layer, 64)]
        assert all(size >= 0 for shape in shapes for size in shape)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(KEYS), value=SCALARS | st.lists(SCALARS, max_size=3) | SCALING | st.just({}))
def test_a_hostile_config_is_a_format_error(tmp_path: Path, good_folder: Path, key: str, value: Any) -> None:
    config = json.loads((good_folder / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((good_folder / "model.safetensors").read_bytes())
    try:
        load(tmp_path)
    except ModelFormatError as error:
        assert str(tmp_path) in str(error)
