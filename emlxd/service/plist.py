"""The property list of the launchd agent."""

from __future__ import annotations

import plistlib
from pathlib import Path
from typing import Any, Final
from xml.parsers.expat import ExpatError

from emlxd.service.definition import OPEN_FILES, RETRY_AFTER, Definition

LABEL: Final = "dev.emlxd.daemon"


def plist(definition: Definition, log: Path) -> dict[str, Any]:
    """What launchd reads. ``log`` takes both standard output and standard error."""
    limits = {"NumberOfFiles": OPEN_FILES}
    return {
        "Label": LABEL,
        "ProgramArguments": list(definition.program),
        "EnvironmentVariables": definition.environment,
        "WorkingDirectory": str(definition.config.parent),
        "StandardOutPath": str(log),
        "StandardErrorPath": str(log),
        "RunAtLoad": True,
        # Status 0 is a stop that was asked for; anything else starts it again.
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RETRY_AFTER,
        "ExitTimeOut": definition.stop_timeout,
        # Not slowed down in favour of what is on the screen.
        "ProcessType": "Interactive",
        "SoftResourceLimits": limits,
        "HardResourceLimits": limits,
    }


def render(definition: Definition, log: Path) -> bytes:
    """The same as XML."""
    return plistlib.dumps(plist(definition, log), sort_keys=False)


def is_ours(content: bytes) -> bool:
    """Whether a file is one that ``render`` gave, for whatever paths."""
    try:
        found = plistlib.loads(content)
    except (plistlib.InvalidFileException, ExpatError, ValueError):
        return False
    if not isinstance(found, dict) or found.get("Label") != LABEL:
        return False
    arguments = found.get("ProgramArguments")
    return isinstance(arguments, list) and arguments[1:] == ["-m", "emlxd", "serve"]
