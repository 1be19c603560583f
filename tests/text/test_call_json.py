"""The arguments of calls are JSON by the standard, in UTF-8."""

from __future__ import annotations

import json

import pytest

from emlxd.core import Tool
from emlxd.text.tools.table import FORMATS
from tests.text.test_tools import read


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
        (
            "hermes",
            f'<tool_call>{{"name": "f", "arguments": {{"x": {"[" * 1200 + "]" * 1200}}}}}</tool_call>',
        ),
        ("llama", "<|python_tag|>f.call(x={1, 2})"),
        ("llama", "<|python_tag|>f.call(x=b'a')"),
        ("llama", "<|python_tag|>f.call(x=1e999)"),
        ("llama", "<|python_tag|>f.call(x={[]: 1})"),
    ],
)
def test_what_is_no_json_is_no_call(name: str, text: str) -> None:
    assert read(FORMATS[name].reader([Tool("f", {})]), [text]) == (text, "", [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"x\": \"\ud800\"}"}</tool_call>'),
        ("llama", r"<|python_tag|>f.call(x='\ud800')"),
    ],
)
def test_arguments_are_utf8(name: str, text: str) -> None:
    _, _, [(_, arguments)] = read(FORMATS[name].reader([Tool("f", {})]), [text])
    assert arguments.encode()
    assert json.loads(arguments) == {"x": "\ud800"}
