"""What `emlxd serve` prints to be called by."""

from __future__ import annotations

import ast
import json
import shlex
import socket

import pytest

from emlxd.config import ServerSettings
from emlxd.core import ModelCard
from emlxd.server import announce, how_to_call
from tests.fakes import FakeRegistry, fake_card


@pytest.mark.parametrize("card", [fake_card(), fake_card(kind="embedding")])
def test_a_model_that_does_not_chat_is_not_called(
    card: ModelCard, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        announce(ServerSettings(), FakeRegistry(card=card), listener)
    first, *calls = capsys.readouterr().out.splitlines()
    assert first.startswith("emlxd serves org/fake-1b at http://127.0.0.1:")
    assert len(calls) == (2 if card.kind == "chat" else 0)


@pytest.mark.parametrize("keys", [False, True])
def test_one_line_for_a_shell_and_one_for_python(keys: bool) -> None:
    shell, python = how_to_call("http://[::1]:8420", "org/small", keys=keys)
    words = shlex.split(shell)
    assert words[:2] == ["curl", "http://[::1]:8420/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "org/small"
    assert ("Authorization: Bearer KEY" in words) == keys
    assert "http://[::1]:8420/v1" in ast.unparse(ast.parse(python.strip()))
    assert ("KEY" in python) == keys
