"""`emlxd reload` and `emlxd check --against-running`."""

from __future__ import annotations

import pytest

PLAN = {"keep": ["small"], "add": ["new"], "drop": [], "needs_restart": ["server.port"]}


@pytest.fixture
def running(config, daemon):
    """A daemon that runs with the configuration here."""
    path = config(port=daemon.server_port)
    daemon.answers["/admin/status"] = {"config": str(path)}
    daemon.answers["/admin/reload?dry_run=false"] = {"plan": PLAN}
    daemon.answers["/admin/reload?dry_run=true"] = {"plan": PLAN}
    return daemon


def test_reload_says_what_changed(emlxd, running):
    result = emlxd("reload")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "new comes\nserver.port changes with the next restart\n"
    assert running.paths[-1] == "/admin/reload?dry_run=false"


def test_a_dry_run_only_asks(emlxd, running):
    assert emlxd("reload", "--dry-run").exit_code == 0
    assert running.paths[-1] == "/admin/reload?dry_run=true"


def test_nothing_to_do_is_said(emlxd, running):
    running.answers["/admin/reload?dry_run=false"] = {"plan": {"keep": ["small"]}}
    assert (
        emlxd("reload").stdout
        == "Nothing changes: the daemon, which follows the file, runs with it already.\n"
    )


def test_check_against_running_tells_the_same(emlxd, running, tmp_path):
    (tmp_path / "small.gguf").unlink()
    result = emlxd("check", "--against-running")
    assert result.exit_code == 1, "the models' paths lead nowhere, which keeps nothing from being compared"
    assert result.stdout.endswith("new comes\nserver.port changes with the next restart\n")
    assert running.paths[-1] == "/admin/reload?dry_run=true"


def test_a_refusal_is_told_with_status_1(emlxd, running):
    running.refusal = (400, "config.yaml:3: unknown key")
    result = emlxd("reload")
    assert (result.exit_code, result.stderr) == (1, "config.yaml:3: unknown key\n")


def test_a_daemon_with_another_file_is_not_asked_to_reload(emlxd, running, config):
    running.answers["/admin/status"] = {"config": str(config(place="other.yaml"))}
    result = emlxd("reload", "-c", "config.yaml")
    assert result.exit_code == 1
    assert "other.yaml, not with config.yaml" in result.stderr
    assert running.paths == ["/admin/status"]


def test_a_daemon_elsewhere_reloads_whichever_file_it_runs_with(emlxd, daemon):
    daemon.answers["/admin/reload?dry_run=false"] = {"plan": PLAN}
    result = emlxd("reload", "--url", daemon.url)
    assert result.exit_code == 0, result.stderr
    assert daemon.paths == ["/admin/reload?dry_run=false"]


def test_a_file_is_checked_against_a_daemon_elsewhere(emlxd, running, config, tmp_path):
    config(port=1)
    (tmp_path / "small.gguf").unlink()
    assert "No server answers" in emlxd("check", "--against-running").stderr
    result = emlxd("check", "--against-running", "--url", f"{running.url}/v1")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.endswith("new comes\nserver.port changes with the next restart\n")


def test_a_key_is_sent_if_there_is_one(emlxd, running, monkeypatch):
    emlxd("reload")
    assert running.keys == {None}
    monkeypatch.setenv("EMLXD_API_KEY", "from-the-environment")
    running.keys.clear()
    emlxd("reload")
    assert running.keys == {"Bearer from-the-environment"}
    monkeypatch.delenv("EMLXD_API_KEY")
    monkeypatch.setenv("EMLXD_SERVER__API_KEYS", '["of-the-file"]')
    running.keys.clear()
    emlxd("reload")
    assert running.keys == {"Bearer of-the-file"}


def test_a_key_that_is_missing_is_asked_for_where_it_can_be_given(emlxd, running):
    running.refusal = (401, "An API key is needed.")
    result = emlxd("reload")
    assert result.exit_code == 1
    assert result.stderr == "An API key is needed. Commands send the one in EMLXD_API_KEY.\n"
