"""Clients that people use, each with a short conversation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import ollama
import pytest
import yaml

from tests.daemon import Daemon

pytestmark = pytest.mark.model

QUESTION = "Why is the sky blue?"
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
NODE = Path(__file__).with_name("conversation.mjs")


def test_langchain(daemon: Daemon) -> None:
    module = pytest.importorskip("langchain_openai")
    model = module.ChatOpenAI(
        base_url=f"{daemon.url}/v1", api_key="none", model="smol", temperature=0, max_tokens=12
    )
    answer = model.invoke([("system", "Be brief."), ("human", QUESTION)])
    assert answer.content and answer.usage_metadata["output_tokens"] == 12
    pieces = list(model.stream([("system", "Be brief."), ("human", QUESTION)], stream_usage=True))
    assert "".join(piece.content for piece in pieces) == answer.content
    assert [piece.usage_metadata for piece in pieces if piece.usage_metadata][-1]["output_tokens"] == 12


@pytest.mark.parametrize("choice", ["required", "any", "get_weather"])
def test_langchain_calls_a_tool(daemon: Daemon, choice: str) -> None:
    module = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage

    model = module.ChatOpenAI(
        base_url=f"{daemon.url}/v1", api_key="none", model="smol", temperature=0, max_tokens=200
    )
    bound = model.bind_tools([WEATHER], tool_choice=choice, parallel_tool_calls=False)
    conversation = [HumanMessage("What is the weather in Paris?")]
    asked = bound.invoke(conversation)
    (call,) = asked.tool_calls
    assert call["name"] == "get_weather" and not asked.invalid_tool_calls
    jsonschema.validate(call["args"], WEATHER["parameters"])
    conversation += [asked, ToolMessage("18 degrees, sunny", tool_call_id=call["id"])]
    assert model.bind_tools([WEATHER], tool_choice="none").invoke(conversation).content


def test_ollama(daemon: Daemon) -> None:
    with ollama.Client(host=daemon.url, timeout=120) as client:
        model = next(model for model in client.list().models if model.model == "smol")
        assert model.size == 98_362_432
        assert model.details is not None and model.details.quantization_level == "Q4_1"
        assert client.show("smol").capabilities == ["completion", "tools"]
        asked: Any = {"model": "smol", "messages": [{"role": "user", "content": QUESTION}]}
        asked["options"] = {"temperature": 0, "num_predict": 12}
        whole = client.chat(**asked)
        parts = list(client.chat(**asked, stream=True))
        assert "".join(part.message.content or "" for part in parts) == whole.message.content
        assert whole.eval_count == parts[-1].eval_count == 12
        format = WEATHER["parameters"]
        held = client.chat(**asked | {"format": format, "options": {"temperature": 1.5, "seed": 1}})
        jsonschema.validate(json.loads(held.message.content or ""), format)


def test_llm(daemon: Daemon, tmp_path: Path) -> None:
    """A person at a shell."""
    pytest.importorskip("llm")
    models = [{"model_id": "smol", "model_name": "smol", "api_base": f"{daemon.url}/v1", "api_key_name": "x"}]
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))

    def ask(*arguments: str) -> str:
        command = [
            sys.executable,
            "-m",
            "llm",
            "-m",
            "smol",
            "-o",
            "temperature",
            "0",
            "-o",
            "max_tokens",
            "12",
        ]
        environment = os.environ | {"LLM_USER_PATH": str(tmp_path)}
        done = subprocess.run(
            [*command, "--key", "none", *arguments, QUESTION], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert ask() == ask("--no-stream") != ""


def test_node(daemon: Daemon, tmp_path: Path) -> None:
    """OpenAI's client for Node, with its own reading of streams."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("npm is not here")
    shutil.copy(NODE, tmp_path)
    installed = subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "openai@6"], cwd=tmp_path, capture_output=True, text=True
    )
    if installed.returncode:
        pytest.skip(f"npm cannot install the openai package: {installed.stderr[-200:]}")
    done = subprocess.run(
        ["node", NODE.name, f"{daemon.url}/v1"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
