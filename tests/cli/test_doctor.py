"""`emlxd doctor` on machines where something is wrong."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from emlxd.cli import doctor


@pytest.fixture
def found(emlxd):
    """What it finds, by what it looked at."""

    def run(status: int = 0) -> dict[str, dict[str, str]]:
        result = emlxd("doctor", "--json")
        assert result.exit_code == status, result.output
        return {finding["what"]: finding for finding in json.loads(result.stdout)}

    return run


def test_all_is_well(found, config):
    config("models: []")
    findings = found()
    assert {"python", "mlx", "device", "open files", "configuration", "models", "memory", "port"} <= set(
        findings
    )
    assert not [finding for finding in findings.values() if finding["level"] == "bad"]


def test_it_reads_as_a_table(emlxd, config):
    config("models: [{name: absent, source: {hf: org/absent}}]")
    lines = emlxd("doctor").stdout.splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith("note  models"))
    assert "not here yet: absent" in lines[place]
    assert lines[place + 1].strip() == "-> emlxd pull fetches them."


def test_a_path_that_leads_nowhere_is_bad(found, config):
    config("models: [{name: lost, source: {path: lost.gguf}}]")
    finding = found(1)["models"]
    assert (finding["level"], finding["found"].startswith("lost: ")) == ("bad", True)
    assert "pull" not in finding["to_do"]


@pytest.mark.parametrize(("models", "level"), [("", "note"), ("{name: a, source: {hf: org/a}}", "bad")])
def test_a_cache_that_cannot_be_written(found, config, tmp_path, monkeypatch, models, level):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EMLXD_CACHE", str(tmp_path / "file" / "cache"))
    config(f"models: [{models}]")
    finding = found(int(level == "bad"))["cache"]
    assert (finding["level"], "Not a directory" in finding["found"]) == (level, True)
    assert "EMLXD_CACHE" in finding["to_do"]


def test_a_broken_configuration_is_bad(found, config):
    config("models:\n  - {name: a, sourze: {path: x}}\n")
    finding = found(1)["configuration"]
    assert (finding["level"], "config.yaml:2" in finding["found"]) == ("bad", True)


def test_a_model_that_cannot_be_read_is_bad(found, config):
    config("models: [{name: small, source: {path: small.gguf}}]")
    assert found(1)["memory"]["level"] == "bad"


VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               1000.
Pages active:                           500000.
Pages inactive:                           2000.
Pages speculative:                           3.
"""


def test_free_memory(monkeypatch):
    if sys.platform == "linux":
        assert 0 < doctor._free_memory() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=VM_STAT))
    assert doctor._free_memory() == 16384 * 3003
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="?"))
    assert doctor._free_memory() is None


def test_the_port(found, config, daemon):
    config(f"server: {{port: {daemon.server_port}}}\nmodels: []")
    daemon.answers["/health"] = {"status": "ok"}
    assert found()["port"]["found"] == f"emlxd answers at {daemon.url}"
    daemon.answers["/health"] = {"status": "fine"}
    assert found(1)["port"]["found"] == f"another program answers at {daemon.url}"


def test_few_open_files_are_a_note(found, config, monkeypatch):
    config("models: []")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    assert (found()["open files"]["level"], found()["open files"]["found"]) == ("note", "256")


def test_a_cpu_without_a_compiler_or_a_blas_is_a_note(monkeypatch):
    monkeypatch.setattr("emlxd.graph.device.current_device", lambda: SimpleNamespace(kind="cpu"))
    monkeypatch.setattr("emlxd.graph.BLAS", SimpleNamespace(hint="Install one.", library=None))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    findings = {finding.what: finding for finding in doctor._device()}
    assert (findings["blas"].level, findings["blas"].to_do) == ("note", "Install one.")
    assert (findings["compiler"].level, "Install g++" in findings["compiler"].to_do) == ("note", True)
