"""`emlxd serve` up to the point where the server takes over."""

from __future__ import annotations

import pytest

from emlxd import daemon, log, sources
from emlxd.errors import SourceError, UserError


@pytest.fixture
def steps(monkeypatch):
    """What happened, in order. Nothing is served."""
    steps = []
    monkeypatch.setattr(log, "configure", lambda settings: steps.append(("log", settings.level)))
    monkeypatch.setattr(sources, "fetch", lambda source, progress: steps.append(("fetch", source.path.name)))
    monkeypatch.setattr(
        daemon, "run", lambda settings, path, shown: steps.append(("run", settings.server.port))
    )
    return steps


def test_it_fetches_what_is_missing_and_then_serves(emlxd, config, steps):
    config(port=9000)
    result = emlxd("serve")
    assert result.exit_code == 0, result.stderr
    assert steps == [("log", "info"), ("fetch", "absent.gguf"), ("run", 9000)]


@pytest.mark.parametrize("setting", ["load: on_demand", "required: false"])
def test_what_need_not_be_there_at_the_start_is_not_waited_for(emlxd, config, steps, setting):
    entry = f"{{name: absent, source: {{path: absent.gguf}}, {setting}}}"
    config(f"models: [{{name: small, source: {{path: small.gguf}}}}, {entry}]")
    assert emlxd("serve").exit_code == 0
    assert steps == [("log", "info"), ("run", 8420)]


def test_the_environment_overrides_the_file(emlxd, config, steps, monkeypatch):
    config(port=9000)
    monkeypatch.setenv("EMLXD_SERVER__PORT", "9001")
    assert emlxd("serve").exit_code == 0
    assert steps[-1] == ("run", 9001)


def test_a_model_that_cannot_be_fetched_ends_it_before_it_serves(emlxd, config, steps, monkeypatch):
    def fetch(source, progress):
        raise SourceError("no such package")

    config()
    monkeypatch.setattr(sources, "fetch", fetch)
    result = emlxd("serve")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "absent: no such package")
    assert steps == [("log", "info")]


def test_what_the_server_cannot_do_is_one_line(emlxd, config, steps, monkeypatch):
    def run(settings, path, shown):
        raise UserError("Port 9000 is in use.")

    config()
    monkeypatch.setattr(daemon, "run", run)
    result = emlxd("serve")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "Port 9000 is in use.")
    assert "Traceback" not in result.stderr
