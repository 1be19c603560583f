"""What a step of few tokens costs in a layer with experts."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from emlxd.graph.checkpoint import open_checkpoint
from emlxd.graph.device import Device
from emlxd.graph.loader import load_transformer
from emlxd.graph.moe import Moe
from emlxd.graph.operations import primitives
from tests.graph import tiny
from tests.graph.tiny_families import oracle_of


def test_few_tokens_cost_one_softmax_and_no_indices(tmp_path: Path) -> None:
    oracle, config = oracle_of("qwen3_moe")
    folder = tiny.save(tmp_path, oracle, config)
    model = load_transformer(open_checkpoint(folder), Device("metal"), max_context=64, dtype="float32")
    layer = next(one.feed_forward for one in model.layers if isinstance(one.feed_forward, Moe))
    x = mx.random.normal((4, 1, 64))
    mx.eval(x)
    found = primitives([layer(x)])
    assert found.count("Softmax") == 1
    assert "Arange" not in found
    assert "GatherMM" in found
