"""One daemon with the default model, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emlxd.config import Source
from emlxd.sources import locate
from tests.daemon import DEFAULT_SOURCE, Daemon, running

MODEL = {"name": "smol", "aliases": ["org/smol"], "source": DEFAULT_SOURCE, "slots": 8, "max_context": 1024}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``emlxd pull`` fetches the model; without it these tests have nothing to talk to."""
    if locate(Source(**DEFAULT_SOURCE)) is None:
        for item in items:
            if item.get_closest_marker("model"):
                item.add_marker(pytest.mark.skip(reason="the default model is not in the cache"))


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("daemon"), {"models": [MODEL]}) as daemon:
        yield daemon
