"""What `emlxd serve` prints to be called by."""

from __future__ import annotations

import ast
import json
import shlex

import pytest

from emlxd.server import how_to_call


@pytest.mark.parametrize("keys", [False, True])
def test_one_line_for_a_shell_and_one_for_python(keys: bool) -> None:
    shell, python = how_to_call("http://[::1]:8420", "org/small", keys=keys)
    words = shlex.split(shell)
    assert words[:2] == ["curl", "http://[::1]:8420/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "org/small"
    assert ("Authorization: Bearer KEY" in words) == keys
    assert "http://[::1]:8420/v1" in ast.unparse(ast.parse(python.strip()))
    assert ("KEY" in python) == keys
