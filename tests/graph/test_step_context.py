"""What the layers of a forward share is computed once."""

from __future__ import annotations

import io
from pathlib import Path

import mlx.core as mx
import pytest

from emlxd.graph.attention import Place
from emlxd.graph.checkpoint import open_checkpoint
from emlxd.graph.device import current_device
from emlxd.graph.kv_cache import empty_layers
from emlxd.graph.loader import load_transformer
from tests.device import only_on_cpu
from tests.graph import tiny


def arrays_of_numbers(folder: Path, layers: int) -> int:
    """How many of them one token a row takes, in the whole graph."""
    model = load_transformer(
        open_checkpoint(tiny.save(folder, *tiny.make_llama(num_hidden_layers=layers))),
        current_device(),
        max_context=512,
    )
    kept = empty_layers(model.spec, 2, 512, model.dtype)
    starts = mx.array([3, 5], mx.int32)
    hidden = model.forward(mx.array([[1], [2]]), Place(slice(0, 2), starts, 1, 256), kept)
    graph = io.StringIO()
    mx.export_to_dot(graph, hidden, *(array for layer in kept for array in layer))
    return graph.getvalue().count('[label ="Arange')


@only_on_cpu("a GPU's operations are other ones")
@pytest.mark.parametrize("layers", [2, 5])
def test_indices_do_not_grow_with_layers(tmp_path: Path, layers: int) -> None:
    assert arrays_of_numbers(tmp_path / "more", layers) == arrays_of_numbers(tmp_path / "one", 1) > 0
