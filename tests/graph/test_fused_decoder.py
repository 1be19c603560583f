"""The decode step in one kernel: what it takes, and that it computes what MLX's operations compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from structlog.testing import capture_logs

from emlxd.core import SamplingParams
from emlxd.graph import random_model
from emlxd.graph.attention import Place
from emlxd.graph.batch import Begin, PrefillRow
from emlxd.graph.checkpoint import open_checkpoint
from emlxd.graph.cuda import fused_decoder, table
from emlxd.graph.cuda.fused_decoder import FusedDecoder
from emlxd.graph.cuda.pairs import in_pairs
from emlxd.graph.cuda.shape import SHARED_BYTES, DecoderShape, Format, KernelShape, places_of
from emlxd.graph.cuda.support import blocks_of
from emlxd.graph.cuda.table import Phase, Table
from emlxd.graph.device import Device, current_device
from emlxd.graph.kv_cache import empty_layers
from emlxd.graph.loader import load_transformer
from emlxd.graph.runner import MlxRunner
from emlxd.graph.transformer import Transformer
from tests import device
from tests.graph.cuda_on_cpu import kernels as cuda_on_cpu

CONTEXT = 1024
LLAMA = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
}
QWEN = LLAMA | {
    "hidden_size": 384,
    "intermediate_size": 640,
    "num_attention_heads": 8,
    "head_dim": 128,
}


def load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int | None, group: int = 64, **changed: Any
) -> Transformer:
    shape = "qwen3-0.6b" if changed.get("model_type") == "qwen3" else "llama-1b"
    config = dict(random_model.SHAPES[shape]) | LLAMA | changed
    monkeypatch.setattr(random_model, "SHAPES", {"tiny": config})
    mx.random.seed(0)
    folder = random_model.write_model(tmp_path / "model", "tiny", bits, group)
    model = load_transformer(open_checkpoint(folder), Device("cuda"), max_context=CONTEXT)
    change_norms(model)
    return model


def change_norms(model: Transformer) -> None:
    """They are ones, and would not show a wrong order."""
    mx.random.seed(1)
    for array in model.arrays():
        if array.ndim == 1:
            array[:] = mx.random.uniform(0.5, 1.5, array.shape).astype(array.dtype)


@pytest.mark.parametrize("bits", [None, 4])
def test_takes_plain_decoders_in_bfloat16_and_in_4_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int | None
) -> None:
    blocks = blocks_of(load(tmp_path, monkeypatch, bits))
    assert blocks is not None
    assert len(blocks) == 2


@pytest.mark.parametrize(
    ("bits", "changed"),
    [
        (8, {}),
        (None, {"hidden_size": 320}),  # not a multiple of 128
        (None, {"head_dim": 32, "num_attention_heads": 8}),
        (None, {"vocab_size": 4104}),
        (None, {"num_attention_heads": 32, "num_key_value_heads": 2}),
        (None, {"hidden_act": "gelu"}),
    ],
)
def test_leaves_other_models_to_the_usual_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int | None, changed: dict[str, Any]
) -> None:
    assert blocks_of(load(tmp_path, monkeypatch, bits, **changed)) is None


def test_the_table_has_the_words_that_the_kernel_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "_addresses", lambda arrays: [7 * (a is not None) for a in arrays])
    model = load(tmp_path, monkeypatch, None)
    blocks = blocks_of(model)
    assert blocks is not None
    words = Table(model, blocks, {"X": 1, "QKV": 2, "ATTENDED": 3, "HIDDEN": 4}).words.tolist()
    phase = 11  # Phase of decode.cuh: two places and four sizes of a matrix, bias, norm, kind, from, to
    assert len(words) == 2 * (4 * phase + 2) + phase
    assert words[:phase] == [7, 0, 256, 32, 16, 8, 0, 7, 0, 1, 2]
    assert words[2 * phase : 3 * phase] == [7, 0, 256, 64, 8, 512, 0, 7, 2, 1, 4]
    assert words[-phase:] == [7, 0, 256, 256, 16, 8, 0, 7, 3, 1, 0]


@pytest.mark.parametrize("group", [32, 64, 128])
def test_scales_lie_in_the_order_in_which_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    monkeypatch.setattr(table, "_addresses", lambda arrays: [7 * (a is not None) for a in arrays])
    model = load(tmp_path, monkeypatch, 4, group)
    blocks = blocks_of(model)
    assert blocks is not None
    for linear, kind, other in ((blocks[0].down, 1, 8), (blocks[0].gate_up, 2, 512)):
        phase = Phase.of(linear, None, kind, 0, 0)
        assert phase.scales is not None
        assert memoryview(phase.scales.view(mx.uint16)).c_contiguous
        # Of unit 3, the second row of the second tile, and the last columns of the second item.
        row, last = 3 * phase.unit_rows + other + 1, 2 * 128 // group - 1
        found = phase.scales[3, 1, 8 + 1, -1]
        wanted = (linear.weight.scales[row, last], linear.weight.biases[row, last])
        assert found.tolist() == [one.item() for one in wanted]
    assert Table(model, blocks, dict.fromkeys(("X", "QKV", "ATTENDED", "HIDDEN"), 0)).nbytes > sum(
        2 * linear.weight.scales.nbytes for block in blocks for linear in block.matrices()
    )


def shape(**changed: Any) -> DecoderShape:
    sizes: dict[str, Any] = {
        "layers": 2,
        "width": 256,
        "hidden": 512,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
    }
    sizes |= {"vocabulary": 4096, "max_context": CONTEXT, "format": Format(16), "eps": 1e-5, "qk_eps": 1e-5}
    return DecoderShape(
        **(sizes | {"scale": 0.125, "magnitude": 1.0, "residual_scale": 1.0, "blocks": 132} | changed)
    )


def test_buffers_do_not_overlap_and_a_kernel_serves_eight_rows() -> None:
    decoder = shape()
    places, size = places_of(decoder)
    starts = [*places.values(), size]
    assert starts == sorted(set(starts))
    assert all(start % 256 == 0 for start in starts)
    assert KernelShape.of(decoder, 1) == KernelShape.of(decoder, 8) != KernelShape.of(decoder, 9)
    assert decoder.splits(1, 1024) * decoder.kv_heads <= decoder.blocks
    assert decoder.splits(32, 1024) == 2


LARGE = {"width": 8192, "hidden": 28672, "heads": 64, "kv_heads": 8, "head_dim": 128, "layers": 80}


@pytest.mark.parametrize("format", [Format(16), Format(4, 32), Format(4, 64), Format(4, 128)], ids=str)
@pytest.mark.parametrize(
    "sizes", [{}, {"width": 4096, "hidden": 14336, "layers": 32}, LARGE], ids=["small", "8B", "70B"]
)
def test_what_fits_leaves_room_in_shared_memory(sizes: dict[str, int], format: Format) -> None:
    decoder = shape(format=format, **sizes)
    for halves in (1, 2, 4):
        kernel = KernelShape(decoder, halves)
        table = (
            8 * (11 * 4 + 2) * decoder.layers
        )  # the kernel's other shared array, but for some hundred bytes
        assert not decoder.fits or kernel.shared_bytes + table < SHARED_BYTES
        assert kernel.staged_bytes % 16 == 0  # what follows is copied to 16 bytes at a time
        assert 2 <= kernel.depth <= 6


def test_a_decoder_whose_rows_have_no_room_is_left_to_the_usual_step() -> None:
    assert shape(format=Format(4), **LARGE).fits
    assert not shape(**LARGE).fits


def test_a_kernel_that_cannot_be_compiled_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> list[int]:
        raise RuntimeError("Failed to compile kernel: cuda_bf16.h not found")

    monkeypatch.setattr(fused_decoder, "_multiprocessors", lambda: 132)
    monkeypatch.setattr(table, "_addresses", fail)
    with capture_logs() as logs:
        assert FusedDecoder.of(load(tmp_path, monkeypatch, None), slots=8, max_context=CONTEXT) is None
    assert [entry["event"] for entry in logs] == ["decoding without the fused kernel"]
    assert "cuda_bf16.h" in logs[0]["error"]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on the GPU that they are for, or on the CPU."""
    if not fused_decoder.on_hopper():
        if device.current() != "cpu" or not cuda_on_cpu.AVAILABLE:
            pytest.skip("takes the GPU that the kernel is for, or a CPU, Linux and g++")
        monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_on_cpu.cuda_kernel)
        monkeypatch.setattr(table, "_addresses", cuda_on_cpu.addresses)
        monkeypatch.setattr(fused_decoder, "_multiprocessors", lambda: 3)


@dataclass(frozen=True)
class Case:
    bits: int | None
    group: int = 64
    changed: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "bfloat16": Case(None),
    "4 bits": Case(4, changed={"model_type": "qwen3"} | QWEN),
    "4 bits by 32": Case(4, 32),
    "4 bits by 128": Case(4, 128),
    "one head a key": Case(None, changed={"num_key_value_heads": 4}),
}


@dataclass(frozen=True)
class Pair:
    """A model, and the same with dense weights in float32."""

    model: Transformer
    exact: Transformer


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    case = CASES[request.param]
    model = load(tmp_path, monkeypatch, case.bits, case.group, **case.changed)
    exact = load_transformer(
        open_checkpoint(tmp_path / "model"),
        current_device(),
        max_context=CONTEXT,
        dtype="float32",
        weights="dense",
    )
    change_norms(exact)
    return Pair(model, exact)


@pytest.mark.numeric
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rows", [1, 3, 8, 16, 32])
def test_computes_what_mlx_computes(pair: Pair, rows: int) -> None:
    fused = FusedDecoder.of(pair.model, slots=rows, max_context=CONTEXT)
    assert fused is not None
    starts = mx.array([(row * 53) % 300 + 5 for row in range(rows)], mx.int32)
    exact = empty_layers(pair.exact.spec, rows, CONTEXT, mx.float32)
    prompt = mx.random.randint(0, 4096, (rows, 320))
    pair.exact.forward(prompt, Place(slice(0, rows), mx.zeros_like(starts), 320, 512, None), exact)
    kept = [[array.astype(mx.bfloat16) for array in layer] for layer in exact]
    mx.eval(exact, kept)
    tokens, one = mx.arange(rows, dtype=mx.int32), mx.ones_like(starts)
    for step in range(2):
        positions = starts + step
        found = fused.logits(tokens, positions, one, 512, kept)
        place = Place(slice(0, rows), positions, 1, 512, one)
        wanted = pair.exact.logits(pair.exact.forward(tokens[:, None], place, exact)[:, 0])
        mx.eval(found, wanted, exact)
        error = mx.linalg.norm(found - wanted, axis=1) / mx.linalg.norm(wanted, axis=1)
        assert error.max().item() < 0.015  # bfloat16: 0.005 to 0.008 is usual
        tokens = wanted.argmax(axis=-1).astype(mx.int32)
    for layer, other in zip(kept, exact, strict=True):
        for array, same in zip(layer, other, strict=True):
            assert mx.abs(array.astype(mx.float32) - same).max().item() < 0.1


@pytest.mark.numeric
@pytest.mark.usefixtures("kernels")
def test_a_row_that_does_not_decode_writes_nothing(pair: Pair) -> None:
    fused = FusedDecoder.of(pair.model, slots=2, max_context=CONTEXT)
    assert fused is not None
    kept = empty_layers(pair.model.spec, 2, CONTEXT, pair.model.dtype)
    at = mx.array([3, 5], mx.int32)
    mx.eval(fused.logits(at, at, mx.array([1, 0], mx.int32), 256, kept))
    for keys, values in kept:
        for array in (keys, values):
            assert mx.abs(array[0, :, 3]).max().item() > 0
            assert mx.abs(array[1]).max().item() == 0


@pytest.mark.numeric
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_tokens_come_in_pairs(count: int) -> None:
    tokens = mx.arange(100, 148, dtype=mx.int32)
    pairs = in_pairs(tokens, count)
    assert {(pair.shape, pair.dtype) for pair in pairs} == {((2,), mx.int32)}
    assert [token for pair in pairs for token in pair.tolist()][:count] == tokens[:count].tolist()
    assert len(pairs) == (count + 1) // 2


@pytest.mark.numeric
@pytest.mark.usefixtures("kernels")
def test_a_runner_reads_the_tokens_that_it_goes_on_with(pair: Pair) -> None:
    fused = FusedDecoder.of(pair.model, slots=4, max_context=CONTEXT)
    compile = fused_decoder.on_hopper()  # a kernel on a CPU cannot be traced
    runner = MlxRunner(pair.model, slots=4, max_context=CONTEXT, compile=compile, fused=fused)
    greedy = Begin(SamplingParams(temperature=0.0), (1, 2))
    runner.prefill([PrefillRow(slot, 0, (1, 2 + slot), greedy) for slot in range(3)])
    for position in (2, 3):
        step = runner.decode([position] * 3)
        assert step.read().tokens == runner._tokens[:3].tolist()
