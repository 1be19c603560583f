"""One daemon with the default model, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from emlxd.config import Source
from emlxd.sources import locate
from tests.daemon import DEFAULT_SOURCE, Daemon, running
from tests.graph import tiny_adapters

MODEL = {"name": "smol", "aliases": ["org/smol"], "source": DEFAULT_SOURCE, "slots": 8, "max_context": 1024}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``emlxd pull`` fetches the model; without it these tests have nothing to talk to."""
    if locate(Source(**DEFAULT_SOURCE)) is None:
        for item in items:
            if item.get_closest_marker("model"):
                item.add_marker(pytest.mark.skip(reason="the default model is not in the cache"))


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """The model has an adapter, which must not be noticed by who does not ask for it."""
    folder = tmp_path_factory.mktemp("daemon")
    adapters = [{"name": "odd", "source": {"path": str(write_adapter(folder / "odd"))}}]
    with running(folder, {"models": [MODEL | {"adapters": adapters}]}) as daemon:
        yield daemon


def write_adapter(folder: Path) -> Path:
    """A random one for two of the default model's layers."""
    mx.random.seed(0)
    tensors = {
        f"model.layers.{layer}.self_attn.q_proj.lora_{side}": mx.random.normal(shape) * 0.2
        for layer in (10, 20)
        for side, shape in (("a", (576, 4)), ("b", (4, 576)))
    }
    tiny_adapters.write(folder, {"num_layers": 30, "lora_parameters": {"rank": 4, "scale": 1.0}}, tensors)
    return folder
