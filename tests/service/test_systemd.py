"""The systemd unit: what it says, and what systemctl is told."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from emlxd.config import Settings
from emlxd.errors import UserError
from emlxd.service.definition import Definition, define
from emlxd.service.systemd import UserUnit, render


@pytest.fixture
def unit(home: Path) -> UserUnit:
    path = home / "config.yaml"
    path.write_text("models: []\n")
    return UserUnit(define(path, Settings()))


def told(home: Path) -> list[str]:
    calls = json.loads((home.parent / "state.json").read_text())["calls"]
    assert all(call[0] == "--user" for call in calls)
    return [" ".join(call[1:]) for call in calls]


def test_the_unit_says_what_systemd_must_know(unit: UserUnit, home: Path) -> None:
    lines = unit.render().splitlines()
    for line in (
        "Type=exec",
        f"ExecStart={sys.executable} -m emlxd serve",
        "ExecReload=/bin/kill -HUP $MAINPID",
        f'Environment="EMLXD_CONFIG={home}/config.yaml"',
        f"WorkingDirectory={home}",
        "Restart=on-failure",
        "RestartPreventExitStatus=1 2",
        "KillMode=mixed",
        "TimeoutStopSec=45",
        "LimitNOFILE=8192",
        "WantedBy=default.target",
    ):
        assert line in lines


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
@pytest.mark.parametrize(
    ("program_folder", "config_folder"),
    [("plain", "plain"), ("a b", 'a "b" c'), ("100%n", "100%n"), ("$HOME", "$HOME"), ("x", "back\\slash")],
)
def test_systemd_accepts_it(tmp_path: Path, program_folder: str, config_folder: str) -> None:
    for folder in {program_folder, config_folder}:
        (tmp_path / folder).mkdir()
    program, config = tmp_path / program_folder / "python", tmp_path / config_folder / "c.yaml"
    program.symlink_to(sys.executable)
    path = tmp_path / "emlxd.service"
    path.write_text(render(Definition((str(program), "-m", "emlxd", "serve"), config, 45)))
    verified = subprocess.run(
        ["systemd-analyze", "--user", "verify", "--man=no", path],
        capture_output=True,
        text=True,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    ours = [line for line in verified.stderr.splitlines() if "emlxd.service" in line]
    assert ours == []


def test_install_and_uninstall(unit: UserUnit, home: Path) -> None:
    unit.install()
    assert unit.file == home / ".config/systemd/user/emlxd.service"
    assert unit.file.read_text() == unit.render()
    assert told(home) == ["daemon-reload", "enable emlxd.service", "restart emlxd.service"]
    for _ in range(2):
        assert unit.uninstall() == "emlxd.service is not installed."
        assert not unit.file.exists()
    assert told(home)[3:] == ["disable --now emlxd.service", "daemon-reload"]


@pytest.mark.parametrize("verb", ["install", "uninstall"])
def test_a_foreign_unit_is_left_alone(unit: UserUnit, verb: str) -> None:
    unit.file.parent.mkdir(parents=True)
    unit.file.write_text("[Service]\n")
    with pytest.raises(UserError, match="not emlxd's"):
        getattr(unit, verb)()
    assert unit.file.read_text() == "[Service]\n"


def test_the_other_verbs(unit: UserUnit, home: Path) -> None:
    for verb in ("start", "stop", "restart", "reload"):
        getattr(unit, verb)()
    assert told(home) == [f"{verb} emlxd.service" for verb in ("start", "stop", "restart", "reload")]
    assert unit.status() == "emlxd.service - inactive"
    assert unit.logs(7, follow=True) == ["journalctl", "--user", "-u", "emlxd.service", "-n", "7", "-f"]


def test_what_systemctl_complains_of_is_told(unit: UserUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSE", "start")
    with pytest.raises(UserError, match=r"`systemctl --user start emlxd\.service` failed: Failed to connect"):
        unit.start()
    monkeypatch.setenv("REFUSE", "status")
    with pytest.raises(UserError, match="systemd does not answer: Failed to connect"):
        unit.status()


def test_nothing_is_left_where_systemd_does_not_answer(
    unit: UserUnit, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSE", "daemon-reload")
    with pytest.raises(UserError, match="Failed to connect"):
        unit.install()
    assert not unit.file.exists()
    monkeypatch.setenv("REFUSE", "nothing")
    unit.install()
    monkeypatch.setenv("REFUSE", "disable")
    with pytest.raises(UserError, match=r"Failed to connect.* is removed; emlxd may still run"):
        unit.uninstall()
    assert not unit.file.exists()
