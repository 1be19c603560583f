"""The versions of what is installed."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def package_version(package: str = "emlxd") -> str:
    """The installed version of ``package``, or "unknown" when it runs without being installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
