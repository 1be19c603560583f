"""A model with adapters computes what mlx-lm computes with each of them, whoever shares the batch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tuner.utils import load_adapters

from emlxd.config import AdapterSettings, ModelSettings, Source
from emlxd.errors import ModelFormatError
from emlxd.footprint import predict
from emlxd.graph.adapter_files import read_adapter
from emlxd.graph.batch import Begin, PrefillRow
from emlxd.graph.open import open_runner
from emlxd.graph.runner import MlxRunner
from tests.agreement import GREEDY, assert_greedy, assert_same
from tests.graph import tiny, tiny_adapters
from tests.graph.test_gguf import write_gguf
from tests.graph.test_parity import PROMPT
from tests.graph.tiny_families import oracle_of


def settings(folder: Path, adapters: Sequence[Path], **changes: Any) -> ModelSettings:
    entries = [
        AdapterSettings(name=f"a{number}", source=Source(path=path)) for number, path in enumerate(adapters)
    ]
    return ModelSettings(
        name="tiny", source=Source(path=folder), adapters=tuple(entries), slots=4, dtype="float32", **changes
    )


def generate(runner: MlxRunner, rows: Sequence[tuple[list[int], int]], count: int) -> list[list[int]]:
    """Greedy tokens for prompts with the number of an adapter each: prefilled and decoded side by side."""
    begun = [
        PrefillRow(slot, 0, tuple(prompt), Begin(GREEDY, tuple(prompt)), adapter=adapter)
        for slot, (prompt, adapter) in enumerate(rows)
    ]
    out = [[token] for token in runner.prefill(begun).read().tokens]
    for step in range(count - 1):
        tokens = runner.decode([len(prompt) + step for prompt, _ in rows]).read().tokens
        for answer, token in zip(out, tokens, strict=True):
            answer.append(token)
    return out


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A model and three adapters of other ranks, layers and formats."""
    folder = tmp_path_factory.mktemp("adapted")
    model, config = tiny.make_llama()
    base = tiny.save(folder / "base", model, config)

    def adapter(name: str, **changes: Any) -> Path:
        return tiny_adapters.save_mlx(folder / name, tiny.make_llama()[0], **changes)

    first = adapter("first", seed=1)
    second = adapter("second", seed=2, rank=7, layers=2, keys=["self_attn.k_proj", "mlp.up_proj"], scale=5.0)
    third = tiny_adapters.as_peft(folder / "third", adapter("third-mlx", seed=3, keys=None))
    return base, [first, second, third]


def adapted(model: Any, adapter: Path | None) -> Any:
    """What mlx-lm's own loading makes of the adapter. A PEFT folder lies beside the one it was made of."""
    if adapter:
        source = adapter.with_name(f"{adapter.name}-mlx")
        load_adapters(model, str(source if source.exists() else adapter))
        model.eval()
    return model


@pytest.mark.numeric
@pytest.mark.parametrize("compile", [True, False])
def test_a_batch_of_adapters_gives_the_tokens_of_mlx_lm(
    llama: tuple[Path, list[Path]], compile: bool
) -> None:
    folder, adapters = llama
    runner = open_runner(folder, settings(folder, adapters, compile=compile))
    prompts = [PROMPT[:50], PROMPT[5:20], PROMPT[30:90], PROMPT[2:40]]
    rows = [(prompts[0], 0), (prompts[1], 1), (prompts[2], 2), (prompts[3], 3)]
    answers = generate(runner, rows, 24)
    for (prompt, number), answer in zip(rows, answers, strict=True):
        oracle = adapted(tiny.make_llama()[0], adapters[number - 1] if number else None)
        assert_greedy(oracle, prompt, answer)
        assert_same(generate(runner, [(prompt, number)], 24)[0], answer, oracle, prompt)


def test_only_vectors_are_gathered_for(
    llama: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX's kernel on CUDA does no more."""
    gather, heights = mx.gather_mm, []

    def noting(x: mx.array, *rest: Any, **options: Any) -> mx.array:
        heights.append(x.shape[-2])
        return gather(x, *rest, **options)

    monkeypatch.setattr(mx, "gather_mm", noting)
    folder, adapters = llama
    runner = open_runner(folder, settings(folder, adapters, compile=False))
    generate(runner, [(PROMPT[:20], 1), (PROMPT[:20], 0)], 3)
    runner.verify([22, 22], [[1, 2], [3, 4]], 2)
    assert set(heights) == {1}


def test_each_adapter_says_something_else(llama: tuple[Path, list[Path]]) -> None:
    folder, adapters = llama
    runner = open_runner(folder, settings(folder, adapters))
    answers = generate(runner, [(PROMPT[:20], number) for number in range(4)], 8)
    assert len(set(map(tuple, answers))) == 4


@pytest.mark.numeric
def test_an_adapter_moves_with_its_sequence_and_leaves_with_it(llama: tuple[Path, list[Path]]) -> None:
    folder, adapters = llama
    runner = open_runner(folder, settings(folder, adapters))
    prompt = PROMPT[:20]
    alone = generate(runner, [(prompt, 2)], 10)[0]
    before = generate(runner, [(prompt, 0), (prompt, 1), (prompt, 2)], 5)
    runner.move(2, 0, 24)
    after = [runner.decode([24 + step]).read().tokens[0] for step in range(5)]
    assert_same(before[2] + after, alone, adapted(tiny.make_llama()[0], adapters[1]), prompt)
    runner.release(0)
    traces = runner.traces
    assert_same(generate(runner, [(prompt, 0)], 5)[0], before[0], tiny.make_llama()[0], prompt)
    generate(runner, [(prompt, 0)], 5)
    assert runner.traces == traces + 1, "a step without adapters is one of a model without any"


def test_a_slot_that_is_free_again_has_no_adapter(llama: tuple[Path, list[Path]]) -> None:
    """Otherwise steps that cover it would go on as those with one."""
    folder, adapters = llama
    runner = open_runner(folder, settings(folder, adapters))
    rows = [(PROMPT[:20], 0)] * 3
    generate(runner, rows, 2)
    traces = runner.traces
    generate(runner, [*rows, (PROMPT[:20], 1)], 1)
    runner.release(3)
    runner.decode([20, 20, 20]).read()
    assert runner.traces == traces


@pytest.mark.numeric
def test_drafts_are_checked_with_the_adapter(llama: tuple[Path, list[Path]]) -> None:
    folder, adapters = llama
    runner = open_runner(folder, settings(folder, adapters))
    prompts = [(PROMPT[:20], 1), (PROMPT[:20], 0)]
    answers = generate(runner, prompts, 9)
    generate(runner, prompts, 1)
    found = runner.verify([20, 20], [answer[1:9] for answer in answers], 8)
    for (prompt, number), answer, tokens in zip(prompts, answers, found, strict=True):
        oracle = adapted(tiny.make_llama()[0], adapters[0] if number else None)
        assert_same([answer[0], *tokens[:8]], answer, oracle, prompt)


@pytest.mark.numeric
@pytest.mark.parametrize(
    "family",
    [
        *("phi3", "qwen3_moe", "deepseek_v2", "starcoder2", "gemma3_text"),
        *("granitemoehybrid", "lfm2", "qwen3_next"),
    ],
)
def test_adapters_of_other_families(tmp_path: Path, family: str) -> None:
    """Fused, latent and narrow projections, and the router of a mixture of experts."""
    keys = {
        "phi3": ["self_attn.qkv_proj", "mlp.gate_up_proj"],
        "qwen3_moe": ["self_attn.k_proj", "mlp.gate"],
        "deepseek_v2": [
            *("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa"),
            *("self_attn.o_proj", "mlp.shared_experts.up_proj"),
        ],
        "starcoder2": ["self_attn.v_proj", "mlp.c_fc", "mlp.c_proj"],
        "gemma3_text": list(tiny_adapters.KEYS),
        "granitemoehybrid": ["mamba.in_proj", "shared_mlp.output_linear"],
        "lfm2": ["conv.in_proj", "feed_forward.w3"],
        "qwen3_next": ["self_attn.q_proj", "linear_attn.in_proj_qkvz", "linear_attn.out_proj"],
    }[family]
    oracle, config = oracle_of(family)
    folder = tiny.save(tmp_path / "base", oracle, config)
    adapter = tiny_adapters.save_mlx(tmp_path / "adapter", oracle, seed=1, keys=keys)
    prompt = [token % 160 for token in PROMPT[:30]]
    runner = open_runner(folder, settings(folder, [adapter], max_context=128))
    for number, one in enumerate((None, adapter)):
        assert_greedy(adapted(oracle_of(family)[0], one), prompt, generate(runner, [(prompt, number)], 12)[0])


@pytest.mark.numeric
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "granitemoe"])
def test_adapted_experts(tmp_path: Path, family: str) -> None:
    """With mlx-lm's default, which adapts every projection there is."""
    oracle, config = oracle_of(family)
    folder = tiny.save(tmp_path / "base", oracle, config)
    adapters = [
        tiny_adapters.save_mlx(tmp_path / str(rank), oracle_of(family)[0], seed=rank, rank=rank, keys=None)
        for rank in (2, 5)
    ]
    runner = open_runner(folder, settings(folder, adapters, max_context=128))
    assert_counted(folder, adapters, runner)
    prompts = [[token % 160 for token in PROMPT[start : start + 40]] for start in (0, 10, 20)]
    answers = generate(runner, [(prompt, number) for number, prompt in enumerate(prompts)], 20)
    for number, prompt in enumerate(prompts):
        oracle = adapted(oracle_of(family)[0], adapters[number - 1] if number else None)
        assert_greedy(oracle, prompt, answers[number])
        assert_same(generate(runner, [(prompt, number)], 20)[0], answers[number], oracle, prompt)


@pytest.mark.numeric
def test_experts_adapted_one_by_one(tmp_path: Path) -> None:
    """As PEFT does where a model has a module for each expert; here two of them have none."""
    model, config = oracle_of("qwen3_moe")
    folder = tiny.save(tmp_path / "base", model, config)
    keys = ["mlp.switch_mlp.gate_proj", "mlp.switch_mlp.down_proj"]
    source = tiny_adapters.save_mlx(tmp_path / "mlx", model, seed=1, keys=keys)
    whole: dict[str, mx.array] = mx.load(str(source / "adapters.safetensors"))  # type: ignore[assignment]
    each = {}
    for name, tensor in whole.items():
        stem, _, side = name.rpartition(".lora_")
        layer, _, projection = stem.partition(".switch_mlp.")
        tensor[3:5] = 0
        for expert in (0, 1, 2, 5):
            stored = f"base_model.model.{layer}.experts.{expert}.{projection}.lora_{side.upper()}.weight"
            each[stored] = mx.contiguous(tensor[expert])
    mx.save_safetensors(str(source / "adapters.safetensors"), whole)
    tiny_adapters.write(tmp_path / "peft", PEFT, each, "adapter_model.safetensors")
    runner = open_runner(folder, settings(folder, [source, tmp_path / "peft"], max_context=128))
    prompt = [token % 160 for token in PROMPT[:40]]
    same, other, base = generate(runner, [(prompt, 1), (prompt, 2), (prompt, 0)], 12)
    assert_same(same, other, adapted(oracle_of("qwen3_moe")[0], source), prompt)
    assert other != base


@pytest.mark.numeric
@pytest.mark.parametrize("shape", [{}, {"attention_bias": True, "mlp_bias": True}, {"bits": 8}])
def test_dora_beside_lora_and_none(tmp_path: Path, shape: dict[str, Any]) -> None:
    """Weights whose rows get lengths of their own, in both formats; q and v have some, k has not."""

    def model() -> Any:
        found, config = tiny.make_llama(**{name: value for name, value in shape.items() if name != "bits"})
        return found, tiny.quantize(found, config, bits=8) if "bits" in shape else config

    folder = tiny.save(tmp_path / "base", *model())
    dora = tiny_adapters.save_mlx(tmp_path / "dora", model()[0], seed=1, kind="dora")
    peft = tiny_adapters.as_peft(tmp_path / "peft", dora, use_dora=True)
    lora = tiny_adapters.save_mlx(tmp_path / "lora", model()[0], seed=2, keys=["self_attn.k_proj"])
    adapters = [dora, peft, lora]
    runner = open_runner(folder, settings(folder, adapters))
    assert_counted(folder, adapters, runner)
    prompt = PROMPT[:40]
    answers = generate(runner, [(prompt, number) for number in range(4)], 20)
    for number, adapter in ((0, None), (1, dora), (2, dora), (3, lora)):
        oracle = adapted(model()[0], adapter)
        assert_greedy(oracle, prompt, answers[number])
        assert_same(generate(runner, [(prompt, number)], 20)[0], answers[number], oracle, prompt)


# PEFT's ways to scale


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"lora_alpha": 12}, 3.0),
        ({"lora_alpha": 12, "use_rslora": True}, 6.0),
        ({"lora_alpha": 1, "alpha_pattern": {"q_proj|[kv]_proj": 12, r"mlp\..*": 12, "o_proj": 12}}, 3.0),
    ],
)
def test_the_scale_of_peft(tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    model, base = tiny.make_llama()
    folder = tiny.save(tmp_path / "base", model, base)
    source = tiny_adapters.save_mlx(tmp_path / "mlx", model, seed=1, scale=scale)
    adapter = tiny_adapters.as_peft(tmp_path / "peft", source, **config)
    prompt = PROMPT[:30]
    both = open_runner(folder, settings(folder, [source, adapter]))
    same, other = generate(both, [(prompt, 1), (prompt, 2)], 12)
    assert_same(same, other, adapted(tiny.make_llama()[0], source), prompt)


@pytest.mark.numeric
def test_a_rank_of_its_own_for_a_module(tmp_path: Path) -> None:
    model, base = tiny.make_llama()
    folder = tiny.save(tmp_path / "base", model, base)
    keys = ["self_attn.q_proj", "self_attn.v_proj"]
    source = tiny_adapters.save_mlx(tmp_path / "mlx", model, seed=1, rank=3, keys=keys)
    ranks = {"r": 16, "lora_alpha": 6, "rank_pattern": {"self_attn.[qv]_proj": 3}}
    adapter = tiny_adapters.as_peft(tmp_path / "peft", source, **ranks)
    runner = open_runner(folder, settings(folder, [source, adapter]))
    same, other = generate(runner, [(PROMPT[:30], 1), (PROMPT[:30], 2)], 12)
    assert_same(same, other, adapted(tiny.make_llama()[0], source), PROMPT[:30])


@pytest.mark.numeric
def test_an_adapter_on_a_gguf_file(tmp_path: Path) -> None:
    """Whose queries and keys lie in another order than those that the adapter was trained with."""
    file = tmp_path / "tiny.gguf"
    adapter = tiny_adapters.save_mlx(tmp_path / "adapter", write_gguf(file, "llama"), seed=1)
    oracle = adapted(write_gguf(file, "llama"), adapter)
    prompt = [token % 160 for token in PROMPT[:30]]
    runner = open_runner(file, settings(file, [adapter], max_context=128))
    base, other = generate(runner, [(prompt, 0), (prompt, 1)], 8)
    assert_greedy(oracle, prompt, other)
    assert other != base


# What cannot be used is told


SOME_JSON = st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=3)
SOME_VALUE = st.recursive(
    SOME_JSON,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)


@given(st.sampled_from(["mlx", "peft"]), st.data())
def test_no_configuration_is_a_traceback(
    llama: tuple[Path, list[Path]], tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    source = llama[1][0 if kind == "mlx" else 2]
    config = json.loads((source / "adapter_config.json").read_text())
    inner = config["lora_parameters"] if kind == "mlx" and data.draw(st.booleans()) else config
    known = ["use_dora", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias", *inner]
    inner[data.draw(st.sampled_from(known))] = data.draw(SOME_VALUE)
    folder = tmp_path_factory.mktemp("fuzzed")
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with contextlib.suppress(ModelFormatError):
        read_adapter(folder, 3)


def edit(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**config, **changes}


def tensors(*names: str, shape: Sequence[int] = (64, 4)) -> dict[str, mx.array]:
    return {f"model.layers.0.{name}": mx.ones(shape) for name in names}


MLX = {"num_layers": 1, "lora_parameters": {"rank": 4, "scale": 1.0}}
PEFT = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
Q = "self_attn.q_proj"

WRONG: dict[str, tuple[Any, dict[str, mx.array], str]] = {
    "no format": ({}, {}, "neither lora_parameters"),
    "no object": ([], {}, "expected a JSON object"),
    "dora without a magnitude": (
        edit(MLX, fine_tune_type="dora"),
        {f"model.layers.2.{Q}.lora_{side}": mx.ones((64, 4)) for side in "ab"},
        "has lora_a, lora_b, expected lora_a, lora_b, m",
    ),
    "a magnitude of another size": (
        edit(MLX, fine_tune_type="dora"),
        {
            f"model.layers.2.{Q}.lora_a": mx.ones((64, 4)),
            f"model.layers.2.{Q}.lora_b": mx.ones((4, 64)),
            f"model.layers.2.{Q}.m": mx.ones((32,)),
        },
        "magnitude of .32,., expected one of 64",
    ),
    "full": ({"fine_tune_type": "full"}, {}, "fine_tune_type 'full'"),
    "no scale": ({"num_layers": 1, "lora_parameters": {"rank": 4, "alpha": 1}}, {}, "scale None"),
    "no rank": ({"num_layers": 1, "lora_parameters": {"scale": 1}}, {}, "rank None"),
    "keys": (
        edit(MLX, lora_parameters={"rank": 4, "scale": 1, "keys": Q}),
        {},
        "expected a list of names",
    ),
    "half": (MLX, tensors(f"{Q}.lora_a"), "has lora_a, expected lora_a, lora_b"),
    "misshapen": (MLX, tensors(f"{Q}.lora_a", f"{Q}.lora_b"), "expected .r, in. and .out, r."),
    "other rank": (
        edit(MLX, lora_parameters={"rank": 8, "scale": 1}),
        tensors(f"{Q}.lora_a") | tensors(f"{Q}.lora_b", shape=(4, 64)),
        "has rank 4, but lora_parameters say 8",
    ),
    "other size": (
        edit(MLX, num_layers=3),
        tensors(f"{Q}.lora_a", shape=(32, 4)) | tensors(f"{Q}.lora_b", shape=(4, 64)),
        "weight of 64 x 32, but the model's is 64 x 64",
    ),
    "unknown module": (
        edit(MLX, num_layers=3),
        tensors("self_attn.z_proj.lora_a") | tensors("self_attn.z_proj.lora_b", shape=(4, 64)),
        "adapts model.layers.0.self_attn.z_proj",
    ),
    "embedding": (
        edit(MLX, lora_parameters={"rank": 4, "scale": 1, "keys": ["model.embed_tokens"]}),
        {"model.embed_tokens.lora_a": mx.ones((320, 4)), "model.embed_tokens.lora_b": mx.ones((4, 64))},
        "adapts model.embed_tokens",
    ),
    "layer outside of num_layers": (
        MLX,
        tensors(f"{Q}.lora_a") | tensors(f"{Q}.lora_b", shape=(4, 64)),
        "not among its num_layers and keys",
    ),
    "experts that there are not": (
        edit(MLX, num_layers=3),
        tensors("mlp.switch_mlp.up_proj.lora_a", shape=(2, 4, 64))
        | tensors("mlp.switch_mlp.up_proj.lora_b", shape=(2, 96, 4)),
        "adapts model.layers.0.mlp.switch_mlp.up_proj",
    ),
    "integers": (
        MLX,
        {f"model.layers.2.{Q}.lora_{side}": mx.ones((64, 4), mx.int32) for side in "ab"},
        "expected floating point",
    ),
    "other tensors": (MLX, tensors("self_attn.q_proj.weight"), "no part of a LoRA"),
    "peft biases of its own": (edit(PEFT, lora_bias=True), {}, "sets lora_bias"),
    "peft saved modules": (edit(PEFT, modules_to_save=["lm_head"]), {}, "sets modules_to_save"),
    "peft biases": (edit(PEFT, bias="all"), {}, "bias 'all'"),
    "peft pissa": (edit(PEFT, init_lora_weights="pissa"), {}, "init_lora_weights 'pissa'"),
    "peft of another kind": ({"peft_type": "IA3"}, {}, "peft_type 'IA3'"),
    "peft alpha": (edit(PEFT, lora_alpha="8"), {}, "lora_alpha '8'"),
    "peft pattern": (edit(PEFT, alpha_pattern={"(": 1}), {}, "bad alpha_pattern"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_adapter_is_refused(llama: tuple[Path, list[Path]], tmp_path: Path, what: str) -> None:
    config, content, message = WRONG[what]
    peft = isinstance(config, dict) and "peft_type" in config
    tiny_adapters.write(
        tmp_path, config, content, "adapter_model.safetensors" if peft else "adapters.safetensors"
    )
    with pytest.raises(ModelFormatError, match=message) as caught:
        open_runner(llama[0], settings(llama[0], [tmp_path]))
    assert str(tmp_path) in caught.value.message


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "no adapter_config.json"),
        (lambda folder: (folder / "adapters.safetensors").unlink(), "no adapters.safetensors"),
        (lambda folder: (folder / "adapters.safetensors").write_bytes(b"\xff" * 9), "damaged or truncated"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "cannot be read"),
    ],
)
def test_missing_and_damaged_files_are_told(
    llama: tuple[Path, list[Path]], tmp_path: Path, prepare: Callable[[Path], None], message: str
) -> None:
    tiny_adapters.write(tmp_path, MLX, {})
    prepare(tmp_path)
    with pytest.raises(ModelFormatError, match=message):
        open_runner(llama[0], settings(llama[0], [tmp_path]))


def test_pickled_weights_are_not_read(llama: tuple[Path, list[Path]], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(PEFT))
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ModelFormatError, match=r"adapter_model\.bin, expected adapter_model\.safetensors"):
        open_runner(llama[0], settings(llama[0], [tmp_path]))


def test_adapters_are_counted(llama: tuple[Path, list[Path]]) -> None:
    folder, adapters = llama
    assert_counted(folder, adapters, open_runner(folder, settings(folder, adapters)))


def test_adapters_of_queries_with_gates_are_counted(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "base", *oracle_of("qwen3_next"))
    adapters = [
        tiny_adapters.save_mlx(
            tmp_path / kind, oracle_of("qwen3_next")[0], seed=1, kind=kind, keys=["self_attn.q_proj"]
        )
        for kind in ("lora", "dora")
    ]
    assert_counted(folder, adapters, open_runner(folder, settings(folder, adapters)))


def assert_counted(folder: Path, adapters: Sequence[Path], runner: MlxRunner) -> None:
    """What the adapters take is what was predicted, to the byte."""
    plain, adapted = settings(folder, []), settings(folder, adapters)
    counted = predict(adapted, folder).weights - predict(plain, folder).weights
    assert counted == runner.weight_bytes - open_runner(folder, plain).weight_bytes > 0
