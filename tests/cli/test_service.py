"""`emlxd launchd` and `emlxd systemd`."""

from __future__ import annotations

import plistlib

import pytest


def test_launchd_print(emlxd, config):
    path = config()
    result = emlxd("launchd", "print")
    assert result.exit_code == 0, result.stderr
    found = plistlib.loads(result.stdout.encode())
    assert found["EnvironmentVariables"]["EMLXD_CONFIG"] == str(path)


def test_systemd_print(emlxd, config):
    path = config()
    result = emlxd("systemd", "print")
    assert result.exit_code == 0, result.stderr
    assert f'"EMLXD_CONFIG={path}"' in result.stdout


@pytest.mark.parametrize("manager", ["launchd", "systemd"])
def test_nothing_is_installed_that_could_not_start(emlxd, config, manager, tmp_path):
    config("models: [{name: a}]")
    result = emlxd(manager, "install")
    assert result.exit_code == 1
    assert "config.yaml:1: models[0].source: the key is missing" in result.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("manager", ["launchd", "systemd"])
def test_every_verb_is_there(emlxd, manager):
    text = emlxd(manager, "--help").stdout
    verbs = ("print", "install", "uninstall", "start", "stop", "restart", "reload", "status", "logs")
    assert all(f"\n  {verb} " in text for verb in verbs)
