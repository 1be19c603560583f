"""`emlxd status` and `emlxd ps`."""

from __future__ import annotations

import json

import pytest

from emlxd.cli.status import Speeds

GIB = 1024**3
SMALL = {
    "name": "small",
    "state": "loaded",
    "error": None,
    "memory": {"total": GIB},
    "slots": 4,
    "running": 2,
    "waiting": 1,
    "tokens": 100,
}
STATUS = {
    "config": "/home/ada/config.yaml",
    "ready": True,
    "models": [SMALL, {"name": "absent", "state": "failed", "error": "absent.gguf: no such file"}],
    "memory": {"budget": 4 * GIB, "counted": GIB},
    "last_reload": None,
    "needs_restart": [],
}
REQUEST = {
    "id": "req_1",
    "model": "small",
    "endpoint": "/v1/chat/completions",
    "seconds": 1.26,
    "prompt_tokens": 30,
    "answers": 1,
    "unread_bytes": 0,
}


@pytest.fixture
def running(config, daemon):
    config(port=daemon.server_port)
    daemon.answers["/admin/status"] = STATUS
    daemon.answers["/admin/requests"] = {"requests": [REQUEST]}
    return daemon


def test_status_is_a_table_with_what_went_wrong(emlxd, running):
    result = emlxd("status")
    assert result.exit_code == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert result.stdout.startswith("ready, 1.0 GiB of 4.0 GiB taken, following /home/ada/config.yaml")
    assert lines[2] == ["model", "state", "slots", "waiting", "tokens/s", "memory"]
    assert lines[3] == ["small", "loaded", "2/4", "1", "1.0", "GiB"]
    assert lines[4] == ["absent", "failed"]
    assert lines[6] == ["absent:", "absent.gguf:", "no", "such", "file"]


def test_status_is_there_when_the_file_is_broken(emlxd, running, config):
    """That is when it is wanted: it tells how the reload went."""
    config(f"server: {{port: {running.server_port}}}\nmodels:\n  - {{name: small, slotz: 1}}\n")
    assert emlxd("status").stdout.startswith("ready, 1.0 GiB of 4.0 GiB taken")
    config("server: {port: none}\nmodels: []\n")
    result = emlxd("status")
    assert (result.exit_code, "server.port" in result.stderr) == (1, True)


def test_status_tells_of_a_failed_reload_and_a_restart(emlxd, running):
    failed = {"at": 0, "error": "config.yaml:3: unknown key", "plan": {}}
    running.answers["/admin/status"] = STATUS | {"last_reload": failed, "needs_restart": ["server.port"]}
    said = emlxd("status").stdout
    assert "failed, and nothing was changed:\nconfig.yaml:3: unknown key" in said
    assert "after a restart: server.port" in said


def test_status_as_json(emlxd, running):
    assert json.loads(emlxd("status", "--json").stdout) == STATUS


def test_status_of_another_server_needs_no_configuration(emlxd, daemon):
    daemon.answers["/admin/status"] = STATUS
    assert emlxd("status", "--url", daemon.url).exit_code == 0


def test_without_a_daemon_it_is_one_line(emlxd, config):
    config()
    result = emlxd("status")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("No server answers at http://127.0.0.1:1")


def test_speed_is_what_came_between_two_looks():
    speeds = Speeds()
    assert speeds.since_last({"models": [SMALL]}, 10.0) == {}
    assert speeds.since_last({"models": [SMALL | {"tokens": 150}]}, 12.0) == {"small": 25.0}
    assert speeds.since_last({"models": [SMALL | {"tokens": 7}]}, 13.0) == {}  # loaded anew


def test_watch_goes_on_until_ctrl_c(emlxd, running, monkeypatch):
    looks = []

    def wait(seconds):
        looks.append(seconds)
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", wait)
    result = emlxd("status", "--watch")
    assert (result.exit_code, running.paths) == (0, ["/admin/status"] * 2)


def test_ps(emlxd, running):
    lines = [line.split() for line in emlxd("ps").stdout.splitlines()]
    assert lines == [
        ["id", "model", "endpoint", "prompt", "answers", "seconds"],
        ["req_1", "small", "/v1/chat/completions", "30", "1", "1.3"],
    ]
    assert json.loads(emlxd("ps", "--json").stdout) == [REQUEST]
    running.answers["/admin/requests"] = {"requests": []}
    assert emlxd("ps").stdout == "No request is running.\n"


def test_without_a_configuration_the_environment_says_where_the_daemon_is(emlxd, monkeypatch):
    monkeypatch.setenv("EMLXD_SERVER__PORT", "1")
    assert "No server answers at http://127.0.0.1:1" in emlxd("status").stderr
    monkeypatch.setenv("EMLXD_SERVER__PORT", "many")
    result = emlxd("status")
    assert result.exit_code == 1
    assert result.stderr.startswith("EMLXD_SERVER__PORT: 'many' is not a whole number")
