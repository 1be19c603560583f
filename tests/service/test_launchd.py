"""The launchd agent: what its file says, and what launchctl is told."""

from __future__ import annotations

import json
import os
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from emlxd.config import ServerSettings, Settings
from emlxd.errors import UserError
from emlxd.service.definition import Definition, define
from emlxd.service.launchctl import LaunchAgent
from emlxd.service.plist import LABEL, is_ours, render

EXAMPLE = Path(__file__).parents[2] / "launchd" / f"{LABEL}.plist"
EXAMPLE_DEFINITION = Definition(
    program=("/Users/you/emlxd/.venv/bin/python", "-m", "emlxd", "serve"),
    config=Path("/Users/you/emlxd/config/config.yaml"),
    stop_timeout=45,
)
EXAMPLE_LOG = Path("/Users/you/Library/Logs/emlxd/emlxd.log")


@pytest.fixture
def config(home: Path) -> Path:
    path = home / "config.yaml"
    path.write_text("models: []\n")
    return path


@pytest.fixture
def agent(config: Path) -> LaunchAgent:
    return LaunchAgent(define(config, Settings()), sleep=lambda seconds: None)


def state(home: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((home.parent / "state.json").read_text())
    return found


def told(home: Path) -> list[list[str]]:
    """What changed something, without the questions."""
    return [call for call in state(home)["calls"] if call[0] != "print"]


TARGET = f"gui/{os.getuid()}/{LABEL}"


# The file


def test_the_example_is_what_is_rendered() -> None:
    assert EXAMPLE.read_bytes() == render(EXAMPLE_DEFINITION, EXAMPLE_LOG)


def test_the_file_says_what_launchd_must_know(agent: LaunchAgent, home: Path, config: Path) -> None:
    found = plistlib.loads(agent.render().encode())
    assert found == {
        "Label": LABEL,
        "ProgramArguments": [sys.executable, "-m", "emlxd", "serve"],
        "EnvironmentVariables": {"EMLXD_CONFIG": str(config)},
        "WorkingDirectory": str(home),
        "StandardOutPath": str(home / "Library/Logs/emlxd/emlxd.log"),
        "StandardErrorPath": str(home / "Library/Logs/emlxd/emlxd.log"),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": 45,
        "ProcessType": "Interactive",
        "SoftResourceLimits": {"NumberOfFiles": 8192},
        "HardResourceLimits": {"NumberOfFiles": 8192},
    }
    assert Path(found["ProgramArguments"][0]).is_absolute()


@pytest.mark.parametrize(("drain", "expected"), [(30, 45), (0.2, 16), (600, 615)])
def test_launchd_waits_longer_than_the_drain(config: Path, drain: float, expected: int) -> None:
    definition = define(config, Settings(server=ServerSettings(drain_timeout=drain)))
    assert plistlib.loads(render(definition, EXAMPLE_LOG))["ExitTimeOut"] == expected


def test_a_cache_of_ones_own_is_kept(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMLXD_CACHE", "/big/cache")
    found = plistlib.loads(render(define(config, Settings()), EXAMPLE_LOG))
    assert found["EnvironmentVariables"]["EMLXD_CACHE"] == "/big/cache"


def test_strange_paths_survive(tmp_path: Path) -> None:
    definition = Definition(("/a b/<&>/python", "-m", "emlxd", "serve"), tmp_path / "c & <d>.yaml", 45)
    found = plistlib.loads(render(definition, EXAMPLE_LOG))
    assert found["ProgramArguments"][0] == "/a b/<&>/python"
    assert found["EnvironmentVariables"]["EMLXD_CONFIG"] == str(tmp_path / "c & <d>.yaml")


@pytest.mark.skipif(shutil.which("plistutil") is None, reason="plistutil is not here")
def test_libplist_reads_it_too(tmp_path: Path) -> None:
    path = tmp_path / "agent.plist"
    path.write_bytes(render(EXAMPLE_DEFINITION, EXAMPLE_LOG))
    binary = tmp_path / "agent.bin"
    subprocess.run(["plistutil", "-i", path, "-f", "bin", "-o", binary], check=True)
    assert plistlib.loads(binary.read_bytes()) == plistlib.loads(path.read_bytes())


@pytest.mark.parametrize(
    "content",
    [b"", b"<plist>", b"bplist00garbage", b"text", plistlib.dumps({"Label": "other"}), plistlib.dumps([1])],
)
def test_other_files_are_not_ours(content: bytes) -> None:
    assert not is_ours(content)
    assert not is_ours(plistlib.dumps({"Label": LABEL, "ProgramArguments": ["/bin/sh"]}))


# The verbs


def test_install_starts_the_daemon(agent: LaunchAgent, home: Path) -> None:
    assert "is installed" in agent.install()
    assert agent.file == home / f"Library/LaunchAgents/{LABEL}.plist"
    assert agent.file.read_text() == agent.render()
    assert agent.log.parent.is_dir()
    assert told(home) == [
        ["enable", TARGET],
        ["bootstrap", f"gui/{os.getuid()}", str(agent.file)],
    ]


def test_installing_again_does_nothing(agent: LaunchAgent, home: Path) -> None:
    agent.install()
    before = told(home)
    assert "already" in agent.install()
    assert told(home) == before


def test_a_changed_agent_replaces_the_old_one(agent: LaunchAgent, home: Path, config: Path) -> None:
    agent.install()
    settings = Settings(server=ServerSettings(drain_timeout=99))
    LaunchAgent(define(config, settings), sleep=lambda seconds: None).install()
    assert [call[0] for call in told(home)] == ["enable", "bootstrap", "bootout", "enable", "bootstrap"]
    assert plistlib.loads(agent.file.read_bytes())["ExitTimeOut"] == 114


@pytest.mark.parametrize("verb", ["install", "uninstall"])
def test_a_foreign_file_is_left_alone(agent: LaunchAgent, verb: str) -> None:
    agent.file.parent.mkdir(parents=True)
    agent.file.write_text("mine")
    with pytest.raises(UserError, match="not emlxd's"):
        getattr(agent, verb)()
    assert agent.file.read_text() == "mine"


def test_uninstall_leaves_nothing_and_may_be_said_again(agent: LaunchAgent, home: Path) -> None:
    agent.install()
    for _ in range(2):
        assert agent.uninstall() == f"{LABEL} is not installed."
        assert not agent.file.exists()
    assert not state(home)["loaded"]


def test_stop_lets_requests_finish(agent: LaunchAgent, home: Path) -> None:
    agent.install()
    for _ in range(2):
        assert agent.stop() == f"{LABEL} is stopped."
    assert told(home)[2:] == [["kill", "SIGTERM", TARGET]]
    assert state(home)["loaded"]


def test_start_after_a_stop_and_after_a_logout(agent: LaunchAgent, home: Path) -> None:
    with pytest.raises(UserError, match="not installed"):
        agent.start()
    agent.install()
    agent.stop()
    agent.start()
    assert told(home)[-1] == ["kickstart", TARGET]
    subprocess.run(["launchctl", "bootout", TARGET], check=True)
    subprocess.run(["launchctl", "print", TARGET], check=True, capture_output=True)
    agent.start()
    assert [call[0] for call in told(home)[-2:]] == ["bootstrap", "kickstart"]


def test_restart_and_reload(agent: LaunchAgent, home: Path) -> None:
    agent.install()
    agent.restart()
    agent.reload()
    assert told(home)[2:] == [
        ["kill", "SIGTERM", TARGET],
        ["kickstart", TARGET],
        ["kill", "SIGHUP", TARGET],
    ]


def test_status(agent: LaunchAgent) -> None:
    assert agent.status() == f"{LABEL} is not installed."
    agent.install()
    assert agent.status() == "state: running, pid: 123, last exit code: 0"
    agent.stop()
    assert agent.status() == "state: not running, last exit code: 0"


def test_a_daemon_that_does_not_stop_is_told_of(config: Path, home: Path) -> None:
    waited: list[float] = []
    agent = LaunchAgent(define(config, Settings()), sleep=waited.append)
    agent.install()
    (home.parent / "bin/launchctl").write_text("#!/bin/sh\necho '\tpid = 9'\n")
    with pytest.raises(UserError, match="does not stop"):
        agent.stop()
    assert 45 < sum(waited) < 60


def test_what_launchctl_complains_of_is_told(agent: LaunchAgent, home: Path) -> None:
    (home.parent / "bin/launchctl").write_text("#!/bin/sh\necho 'Bootstrap failed: 5' >&2\nexit 5\n")
    with pytest.raises(UserError, match=r"`launchctl enable .*` failed: Bootstrap failed: 5"):
        agent.install()


def test_without_launchctl_it_says_so(
    agent: LaunchAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="launchctl is not on this machine"):
        agent.status()


def test_logs_are_tailed(agent: LaunchAgent) -> None:
    assert agent.logs(5, follow=False) == ["tail", "-n", "5", str(agent.log)]
    assert agent.logs(5, follow=True) == ["tail", "-n", "5", "-F", str(agent.log)]
