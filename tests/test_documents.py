"""The documents are true: their links lead somewhere, their snippets run, their commands exist."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from emlxd.cli import app
from emlxd.cli.config_page import page
from emlxd.config_file import load
from tests.api.conftest import start_server
from tests.fakes import FakeRegistry, FakeWorker

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
TAUGHT = [ROOT / "README.md", ROOT / "docs" / "quickstart.md"]
DAEMON = "http://127.0.0.1:8420"


def blocks(document: Path, language: str) -> list[str]:
    """Those of the language, an expression. All are matched, so that no end is taken for a beginning."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)
    return [block for name, block in found if re.fullmatch(language, name)]


def taught(language: str) -> list[Any]:
    found = [(document, block) for document in TAUGHT for block in blocks(document, language)]
    return [
        pytest.param(block, id=f"{document.name}-{place}") for place, (document, block) in enumerate(found)
    ]


def lines(script: str) -> Iterator[list[str]]:
    """The commands of a shell block, as words."""
    for line in script.replace("\\\n", " ").split("\n" if "'{" not in script else "\0"):
        if words := shlex.split(line, comments=True):
            yield words


def test_the_configuration_page_is_that_of_the_settings() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == page(), (
        "write it anew: python -m emlxd.cli.config_page > docs/configuration.md"
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"(?:\]\(|src=\"|srcset=\")([^)#\s\"]+)", document.read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (document.parent / link).exists()] == []


def test_every_page_is_reached_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [path.name for path in (ROOT / "docs").glob("*.md") if f"docs/{path.name}" not in readme] == []


@pytest.mark.parametrize("script", taught("sh"))
def test_a_shell_block_is_shell(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def command_names() -> set[str]:
    return set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_options_exist(document: Path) -> None:
    """Every `emlxd ...` in a block, and every `emlxd name` in the text."""
    text = document.read_text()
    known = command_names()
    assert set(re.findall(r"`emlxd ([a-z]+)", text)) <= known
    for script in blocks(document, "(?:sh)?"):
        for line in re.findall(r"^emlxd .*$", script, re.MULTILINE):
            check_usage(shlex.split(line.replace("\\", ""), comments=True)[1:])


def check_usage(words: list[str]) -> None:
    """Raises click's error for a command or an option that does not exist."""
    command: Any = typer.main.get_command(app)
    context = click.Context(command)
    while hasattr(command, "commands") and words:
        command = command.commands[words[0]]
        words = words[1:]
    if not hasattr(command, "commands"):
        command.make_context("emlxd", words, parent=context, resilient_parsing=False)


def test_every_command_is_in_the_readme() -> None:
    block = next(script for script in blocks(ROOT / "README.md", "sh") if "emlxd serve" in script)
    assert {words[1] for words in lines(block)} == command_names()


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        assert set(re.findall(r"^make ([a-z]+)|`make ([a-z]+)", document.read_text(), re.MULTILINE)) <= {
            pair for target in targets for pair in ((target, ""), ("", target))
        }


@pytest.mark.parametrize("block", taught("yaml"))
def test_a_yaml_block_is_what_its_reader_takes(block: str, tmp_path: Path) -> None:
    data = yaml.safe_load(block)
    if "source" in str(data["models"][0] if "models" in data else ""):
        file = tmp_path / "config.yaml"
        file.write_text(block)
        assert load(file, {}).models
    else:
        assert f"{DAEMON}/v1" in block and "smollm2-135m" in block


@pytest.fixture
def default_model() -> FakeRegistry:
    return FakeRegistry(worker=FakeWorker(name="smollm2-135m"), aliases=())


@pytest.mark.parametrize("block", taught("python"))
async def test_a_python_block_runs(block: str, default_model: FakeRegistry) -> None:
    async with start_server(default_model) as server:
        said = await output_of(sys.executable, "-c", block.replace(DAEMON, server.url))
    assert said == "one two three four five six\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("script", [block for block in taught("sh") if "curl" in block.values[0]])
async def test_a_curl_block_runs(script: str, default_model: FakeRegistry) -> None:
    async with start_server(default_model) as server:
        (words,) = lines(script.replace(DAEMON, server.url))
        said = await output_of(*words, "-sf")
    assert "six" in said


def test_models_that_snippets_ask_for_are_in_the_shipped_configuration() -> None:
    """So that who copies one gets an answer."""
    shipped = load(ROOT / "config" / "config.yaml", {}).models
    names = {name for model in shipped for name in (model.name, *model.aliases)}
    for document in DOCUMENTS:
        for script in blocks(document, "(?:sh)?"):
            if DAEMON in script:
                assert set(re.findall(r'"model": "([^"]+)"', script)) <= names, document.name


async def output_of(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode()
