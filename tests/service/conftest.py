"""Service managers that only pretend: programs on PATH that keep what they are told."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

LAUNCHCTL = """
import json, os, pathlib, sys
state_file = pathlib.Path(os.environ["PRETEND"]) / "state.json"
state = {"loaded": False, "pid": None, "calls": []}
if state_file.exists():
    state = json.loads(state_file.read_text())
verb, *rest = sys.argv[1:]
state["calls"].append([verb, *rest])
target = rest[-1]
status = 0
if verb == "print":
    if state["loaded"] or state.pop("leaving", 0):
        print(target, "= {\\n\\tstate =", "running" if state["pid"] else "not running")
        if state["pid"]:
            print("\\tpid =", state["pid"])
        print("\\tlast exit code = 0\\n\\tendpoints = {\\n\\t\\tstate = other\\n\\t}\\n}")
    else:
        print("Could not find service", file=sys.stderr)
        status = 113
    if state.pop("stopping", None):
        state["pid"] = None
elif verb == "bootstrap":
    if state["loaded"] or state.get("leaving"):
        print("Bootstrap failed: 5: Input/output error", file=sys.stderr)
        status = 5
    elif not pathlib.Path(target).is_file():
        print("Bootstrap failed: 2: No such file or directory", file=sys.stderr)
        status = 2
    else:
        state |= {"loaded": True, "pid": 123}
elif verb == "bootout":
    state |= {"loaded": False, "pid": None, "leaving": 1}
elif verb == "kickstart":
    state["pid"] = 124
elif verb == "kill" and rest[0] == "SIGTERM":
    state["stopping"] = True
state_file.write_text(json.dumps(state))
sys.exit(status)
"""

SYSTEMCTL = """
import json, os, pathlib, sys
state_file = pathlib.Path(os.environ["PRETEND"]) / "state.json"
state = json.loads(state_file.read_text()) if state_file.exists() else {"calls": []}
state["calls"].append(sys.argv[1:])
state_file.write_text(json.dumps(state))
if os.environ.get("REFUSE") in sys.argv:
    print("Failed to connect to bus", file=sys.stderr)
    sys.exit(1)
if "status" in sys.argv:
    print("emlxd.service - inactive")
    sys.exit(3)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, with pretending managers first on PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, code in (("launchctl", LAUNCHCTL), ("systemctl", SYSTEMCTL)):
        (programs / name).write_text(f"#!{sys.executable} -S\n{code}")
        (programs / name).chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PRETEND", str(tmp_path))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("EMLXD_CACHE", raising=False)
    return home
