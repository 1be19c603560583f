"""On CUDA long prompts expand quantised matrices first, and are computed layer by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from emlxd.graph import device as devices
from emlxd.graph.attention import Place
from emlxd.graph.checkpoint import open_checkpoint
from emlxd.graph.device import Device
from emlxd.graph.kv_cache import KVCache
from emlxd.graph.loader import load_transformer
from emlxd.graph.operations import primitives
from emlxd.graph.transformer import Transformer
from emlxd.graph.weights import ExpandFrom
from tests import device
from tests.agreement import close
from tests.graph import tiny
from tests.graph.tiny_families import oracle_of

pytestmark = pytest.mark.numeric

CONTEXT = 64
PROMPT = [(7 * i * i + 3 * i) % 160 for i in range(40)]
KIND = "metal" if device.current() == "cpu" else devices.current_device().kind
"""Of a GPU that never expands."""


def load(folder: Path, kind: Any) -> Transformer:
    return load_transformer(
        open_checkpoint(folder), Device(kind), max_context=CONTEXT, dtype="float32", weights="keep"
    )


def quantised(folder: Path, family: str) -> Path:
    oracle, config = oracle_of(family)
    return tiny.save(folder, oracle, tiny.quantize(oracle, config, bits=4))


def logits(model: Transformer, tokens: list[int]) -> mx.array:
    length = len(tokens)
    place = Place(slice(0, 1), mx.array([0]), length, CONTEXT)
    kept = KVCache(model.spec, 1, CONTEXT, model.dtype).layers
    return model.logits(model.forward(mx.array([tokens]), place, kept))[0]


def products(array: mx.array) -> Counter[str]:
    """How many operations of each kind it takes to compute ``array``."""
    return Counter(primitives([array]))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss", "starcoder2"])
def test_expanded_matrices_give_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    folder = quantised(tmp_path, family)
    expected = logits(load(folder, KIND), PROMPT)
    monkeypatch.setattr(devices, "_EXPAND_FROM", ExpandFrom(matrix=2, expert=1))
    found = logits(load(folder, "cuda"), PROMPT)
    assert products(found)["QuantizedMatmul"] == 1  # the head
    assert products(found)["GatherQMM"] == 0
    assert close(found, expected)


def test_a_matrix_is_expanded_for_as_many_rows_as_make_it_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_EXPAND_FROM", ExpandFrom(matrix=20, expert=1 << 20))
    model = load(quantised(tmp_path, "llama"), "cuda")
    fewer, enough = logits(model, PROMPT[:19]), logits(model, PROMPT[:20])
    assert products(fewer)["QuantizedMatmul"] == 1 + 4 * len(model.layers)
    assert products(enough)["QuantizedMatmul"] == 1


def test_experts_are_expanded_when_they_have_enough_rows_on_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six experts, two of them for each token: 30 tokens are ten rows an expert."""
    monkeypatch.setattr(devices, "_EXPAND_FROM", ExpandFrom(matrix=1 << 20, expert=10))
    model = load(quantised(tmp_path, "qwen3_moe"), "cuda")
    fewer, enough = products(logits(model, PROMPT[:29])), products(logits(model, PROMPT[:30]))
    assert fewer["GatherMM"] == enough["GatherQMM"] == 0
    assert fewer["GatherQMM"] == enough["GatherMM"] > 0


def test_only_cuda_expands(tmp_path: Path) -> None:
    folder = quantised(tmp_path, "llama")
    for kind in ("cpu", "metal"):
        assert load(folder, kind).layers[0].feed_forward.down.weight.expand_from is None  # type: ignore[attr-defined]
    assert load(folder, "cuda").layers[0].feed_forward.down.weight.expand_from == 128  # type: ignore[attr-defined]


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """In what order work is given to the device and waited for."""
    calls: list[str] = []
    given: list[mx.array] = []
    dispatch, wait = mx.async_eval, mx.eval

    def number(array: mx.array) -> int:
        return next(index for index, one in enumerate(given) if one is array)

    def dispatched(x: mx.array, *others: mx.array) -> None:
        calls.append(f"give {len(given)}")
        given.append(x)
        dispatch(x, *others)  # type: ignore[no-untyped-call]

    def waited(x: mx.array) -> None:
        calls.append(f"wait for {number(x)}")
        wait(x)

    with monkeypatch.context() as patch:
        patch.setattr(mx, "async_eval", dispatched)
        patch.setattr(mx, "eval", waited)
        yield calls


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_the_host_is_one_layer_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    oracle, config = oracle_of(family)
    folder = tiny.save(tmp_path, oracle, config)
    tokens, place = mx.array([PROMPT]), Place(slice(0, 1), mx.array([0]), len(PROMPT), CONTEXT)
    hidden, keeps = {}, {}
    for kind in ("metal", "cuda"):
        model = load(folder, kind)
        cache = KVCache(model.spec, 1, CONTEXT, model.dtype)
        with recorded(monkeypatch) as calls:
            hidden[kind] = model.prefill(tokens, place, cache.layers)
        keeps[kind] = cache.arrays
        expected = ["give 0", "give 1", "wait for 0", "give 2", "wait for 1"] if kind == "cuda" else []
        assert calls == expected
    assert close(hidden["cuda"][0], hidden["metal"][0])
    assert all(close(*pair) for pair in zip(keeps["cuda"], keeps["metal"], strict=True))
