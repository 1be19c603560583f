"""The daemon as a launchd agent of the user, by today's launchctl."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from emlxd.errors import UserError
from emlxd.service.definition import Definition, must, run, write
from emlxd.service.plist import LABEL, is_ours, render

POLL: Final = 0.2  # seconds
_STATE: Final = re.compile(r"^\s*(state|pid|last exit code) = (.+)$", re.MULTILINE)


class LaunchAgent:
    """Every verb may be said again: what is so already stays so. ``sleep`` waits so many seconds."""

    def __init__(self, definition: Definition, sleep: Callable[[float], None] = time.sleep) -> None:
        self._definition = definition
        self._sleep = sleep
        self._domain = f"gui/{os.getuid()}"
        self._target = f"{self._domain}/{LABEL}"
        self.file = Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        self.log = Path.home() / "Library" / "Logs" / "emlxd" / "emlxd.log"

    def render(self) -> str:
        return render(self._definition, self.log).decode()

    def install(self) -> str:
        """Writes the file and starts the daemon. Raises UserError, also for a file that is not ours."""
        content, before = self.render().encode(), self._own_file()
        loaded = self._loaded()
        if before == content and loaded:
            return f"{LABEL} is installed already."
        self._make_log_folder()
        write(self.file, content)
        if loaded:
            self._boot_out()
        must(["launchctl", "enable", self._target])
        must(["launchctl", "bootstrap", self._domain, str(self.file)])
        return f"{LABEL} is installed and starts with your login: {self.file}"

    def uninstall(self) -> str:
        """Stops the daemon and removes the file. Raises UserError for a file that is not ours."""
        self._own_file()
        if self._loaded():
            self._boot_out()
        self.file.unlink(missing_ok=True)
        return f"{LABEL} is not installed."

    def start(self) -> str:
        if not self._loaded():
            self._must_be_installed()
            must(["launchctl", "bootstrap", self._domain, str(self.file)])
        must(["launchctl", "kickstart", self._target])
        return f"{LABEL} runs."

    def stop(self) -> str:
        """A stop in order: running requests finish. It starts again with the next login, or by ``start``."""
        if "pid" in self._state():
            must(["launchctl", "kill", "SIGTERM", self._target])
            self._wait(lambda: "pid" not in self._state(), "does not stop")
        return f"{LABEL} is stopped."

    def restart(self) -> str:
        # Not `kickstart -k`, which leaves running requests no time.
        self.stop()
        return self.start()

    def reload(self) -> str:
        must(["launchctl", "kill", "SIGHUP", self._target])
        return f"{LABEL} reads its configuration again; its log says what came of it."

    def status(self) -> str:
        if not self._loaded():
            return f"{LABEL} is {'not running' if self.file.exists() else 'not installed'}."
        return ", ".join(f"{key}: {value}" for key, value in self._state().items())

    def logs(self, lines: int, follow: bool) -> list[str]:
        """The command that shows them."""
        return ["tail", "-n", str(lines), *(["-F"] if follow else []), str(self.log)]

    def _own_file(self) -> bytes | None:
        """The file as it is, None if there is none. Raises UserError for one that emlxd has not written."""
        content = self.file.read_bytes() if self.file.exists() else None
        if content is not None and not is_ours(content):
            raise UserError(f"{self.file} is not emlxd's; it was left as it is.")
        return content

    def _make_log_folder(self) -> None:
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"Cannot make {self.log.parent}: {error.strerror}.") from None

    def _must_be_installed(self) -> None:
        if not self.file.exists():
            raise UserError(f"{LABEL} is not installed. `emlxd launchd install` does that.")

    def _loaded(self) -> bool:
        return run(["launchctl", "print", self._target]).returncode == 0

    def _state(self) -> dict[str, str]:
        """``state``, ``pid`` if it runs, ``last exit code``; empty if launchd does not know it."""
        found: dict[str, str] = {}
        for key, value in _STATE.findall(run(["launchctl", "print", self._target]).stdout):
            found.setdefault(key, value)  # nested sections repeat some keys
        return found

    def _boot_out(self) -> None:
        # It returns before the daemon has ended, and until then the name is taken.
        must(["launchctl", "bootout", self._target])
        self._wait(lambda: not self._loaded(), "does not leave launchd")

    def _wait(self, done: Callable[[], bool], complaint: str) -> None:
        for _ in range(int((self._definition.stop_timeout + 5) / POLL)):
            if done():
                return
            self._sleep(POLL)
        raise UserError(f"{LABEL} {complaint}; `launchctl print {self._target}` may say why.")
