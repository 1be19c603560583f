"""Clients that people use, each with a short conversation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.daemon import Daemon

pytestmark = pytest.mark.model

QUESTION = "Why is the sky blue?"
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
