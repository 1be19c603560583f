"""The daemon as a systemd unit of the user."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from emlxd.errors import UserError
from emlxd.service.definition import OPEN_FILES, RETRY_AFTER, Definition, must, run, write

UNIT: Final = "emlxd.service"
MARK: Final = "# Written by `emlxd systemd install`, which also replaces it."

_TEMPLATE: Final = """{mark}
[Unit]
Description=emlxd, a daemon that serves language models on MLX
After=network.target

[Service]
Type=exec
ExecStart={program}
ExecReload=/bin/kill -HUP $MAINPID
{environment}
WorkingDirectory={folder}
Restart=on-failure
RestartSec={retry}
# What the user has to mend does not mend itself.
RestartPreventExitStatus=1 2
# Only the daemon is told to stop; it ends what it started.
KillMode=mixed
TimeoutStopSec={stop_timeout}
LimitNOFILE={files}

[Install]
WantedBy=default.target
"""


def render(definition: Definition) -> str:
    return _TEMPLATE.format(
        mark=MARK,
        program=" ".join(_quoted(part) for part in definition.program),
        environment=_environment(definition.environment),
        folder=_escaped(str(definition.config.parent)),
        retry=RETRY_AFTER,
        stop_timeout=definition.stop_timeout,
        files=OPEN_FILES,
    )


def _environment(variables: Mapping[str, str]) -> str:
    return "\n".join(f"Environment={_quoted(f'{name}={value}')}" for name, value in variables.items())


def _quoted(text: str) -> str:
    if text.isascii() and text.replace("/", "").replace("-", "").replace("_", "").replace(".", "").isalnum():
        return text
    return '"' + _escaped(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _escaped(text: str) -> str:
    """``%`` begins a specifier everywhere in a unit."""
    return text.replace("%", "%%")


class UserUnit:
    """Every verb may be said again: what is so already stays so."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
        self.file = Path(home).expanduser() / "systemd" / "user" / UNIT

    def render(self) -> str:
        return render(self._definition)

    def install(self) -> str:
        """Writes the unit, enables and starts it. Raises UserError, also for a unit that is not ours."""
        self._refuse_foreign()
        was_there = self.file.exists()
        write(self.file, self.render().encode())
        try:
            _systemctl("daemon-reload")
            _systemctl("enable", UNIT)
        except UserError:
            if not was_there:
                self.file.unlink()
            raise
        _systemctl("restart", UNIT)
        return f"{UNIT} is installed and starts with your login: {self.file}"

    def uninstall(self) -> str:
        """Stops the daemon and removes the unit. Raises UserError for a unit that is not ours."""
        self._refuse_foreign()
        if self.file.exists():
            try:
                _systemctl("disable", "--now", UNIT)
            except UserError as error:
                self.file.unlink()
                raise UserError(f"{error.message} {self.file} is removed; emlxd may still run.") from None
            self.file.unlink()
            _systemctl("daemon-reload")
        return f"{UNIT} is not installed."

    def start(self) -> str:
        _systemctl("start", UNIT)
        return f"{UNIT} runs."

    def stop(self) -> str:
        """A stop in order: running requests finish."""
        _systemctl("stop", UNIT)
        return f"{UNIT} is stopped."

    def restart(self) -> str:
        _systemctl("restart", UNIT)
        return f"{UNIT} runs."

    def reload(self) -> str:
        _systemctl("reload", UNIT)
        return f"{UNIT} reads its configuration again; its log says what came of it."

    def status(self) -> str:
        # Its status is not 0 for a unit that is stopped, which is an answer too.
        done = run(["systemctl", "--user", "--no-pager", "status", UNIT])
        if not done.stdout.strip():
            raise UserError(f"systemd does not answer: {done.stderr.strip()}")
        return done.stdout.rstrip()

    def logs(self, lines: int, follow: bool) -> list[str]:
        """The command that shows them."""
        return ["journalctl", "--user", "-u", UNIT, "-n", str(lines), *(["-f"] if follow else [])]

    def _refuse_foreign(self) -> None:
        if self.file.exists() and not self.file.read_text(errors="replace").startswith(MARK):
            raise UserError(f"{self.file} is not emlxd's; it was left as it is.")


def _systemctl(*arguments: str) -> None:
    must(["systemctl", "--user", *arguments])
