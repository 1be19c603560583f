"""emlxd doctor"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import typer

from emlxd.cli.options import ConfigOption, JsonOption, find_config, server_url
from emlxd.errors import SourceError, UserError

if TYPE_CHECKING:
    from emlxd.config import ModelSettings, Settings

ENOUGH_FILES: Final = 1024  # open files: a connection each, beside those of models
INSTALL_MLX: Final = "Install it: pip install emlxd on a Mac, 'emlxd[cpu]' or 'emlxd[cuda]' on Linux."
COMPILERS: Final = ("g++", "c++", "clang++")


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one thing, and what to do about it: ``bad`` keeps emlxd from working."""

    what: str
    level: Literal["ok", "note", "bad"]
    found: str
    to_do: str = ""


def doctor(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Look for what keeps emlxd from working well, and say what to do.

    Status 1 if something keeps it from working at all.
    """
    findings = list(examine(config))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    if any(finding.level == "bad" for finding in findings):
        raise typer.Exit(1)


def _print(findings: list[Finding]) -> None:
    from emlxd.cli.table import console, make_table

    table = make_table("", "", "")
    table.show_header = False
    for finding in findings:
        table.add_row(finding.level, finding.what, finding.found)
        if finding.to_do:
            table.add_row("", "", f"-> {finding.to_do}")
    console().print(table)


def examine(config: Path | None) -> Iterator[Finding]:
    """One after the other; what cannot be looked at without an earlier one is left out."""
    yield Finding("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")
    mlx = _mlx()
    yield mlx
    if mlx.level != "bad":
        yield from _device()
    yield _open_files()
    try:
        path = find_config(config)
        settings = _load(path)
    except UserError as error:
        yield Finding("configuration", "bad", error.message, "Correct it; the daemon starts with no other.")
        return
    yield Finding("configuration", "ok", f"{path}: models: {len(settings.models)}")
    yield _models(settings)
    yield _cache(settings)
    if mlx.level != "bad":
        yield _memory(settings)
    yield _port(settings)
    yield _service(path, settings)


def _load(path: Path) -> Settings:
    from emlxd.config_file import load

    return load(path)


def _mlx() -> Finding:
    try:
        import emlxd.graph.device  # noqa: F401  MLX, with what must be loaded before it
    except ImportError as error:
        return Finding("mlx", "bad", f"cannot be imported: {error}", INSTALL_MLX)
    return Finding("mlx", "ok", importlib.metadata.version("mlx"))


def _device() -> Iterator[Finding]:
    from emlxd.graph import BLAS
    from emlxd.graph.device import current_device

    kind = current_device().kind
    yield Finding("device", "ok", kind)
    if kind != "cpu":
        return
    if BLAS.hint:
        yield Finding("blas", "note", BLAS.library or "MLX's own", BLAS.hint)
    else:
        yield Finding("blas", "ok", BLAS.library or "MLX's own")
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler:
        yield Finding("compiler", "ok", compiler)
    else:
        yield Finding(
            "compiler", "note", "none", "Install g++: without it the decode step is not compiled, and slower."
        )


def _open_files() -> Finding:
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= ENOUGH_FILES:
        return Finding("open files", "ok", "unlimited" if limit == resource.RLIM_INFINITY else str(limit))
    return Finding("open files", "note", str(limit), f"Raise it for many clients: ulimit -n {ENOUGH_FILES}")


def _models(settings: Settings) -> Finding:
    from emlxd.sources import check_paths

    missing = _missing(settings)
    for model in missing:
        try:
            check_paths(model)
        except SourceError as error:
            return Finding("models", "bad", f"{model.name}: {error.message}", "Correct its source.")
    if missing:
        names = ", ".join(model.name for model in missing)
        return Finding("models", "note", f"not here yet: {names}", "emlxd pull fetches them.")
    return Finding("models", "ok", "all files are here")


def _missing(settings: Settings) -> list[ModelSettings]:
    from emlxd.sources import locate_model

    return [model for model in settings.models if locate_model(model) is None]


def _cache(settings: Settings) -> Finding:
    """Where downloads go. Models that are here are served from a folder that is read-only, too."""
    import tempfile

    from emlxd.downloads.cache import cache_dir
    from emlxd.memory import format_bytes

    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        level: Literal["note", "bad"] = "bad" if _missing(settings) else "note"
        return Finding("cache", level, str(error), "Set EMLXD_CACHE to a folder that can be written.")
    return Finding("cache", "ok", f"{folder}, {format_bytes(free)} free")


def _memory(settings: Settings) -> Finding:
    from emlxd.footprint import budget, predict
    from emlxd.memory import format_bytes
    from emlxd.sources import locate_model

    limit, total, large = budget(settings.memory), 0, []
    for model in settings.models:
        if here := locate_model(model):
            try:
                needed = predict(*here).total
            except UserError as error:
                return Finding(
                    "memory", "bad", f"{model.name}: {error.message}", "Fetch or name other files."
                )
            total += needed
            large += [model.name] if needed > limit else []
    found = f"the models need {format_bytes(total)}, the budget is {format_bytes(limit)}"
    if (free := _free_memory()) is not None:
        found += f", free now is {format_bytes(free)}"
    if large:
        smaller = "Set fewer slots or a smaller max_context, or raise memory.budget."
        return Finding("memory", "bad", f"{found}; too large alone: {', '.join(large)}", smaller)
    if total > limit:
        return Finding(
            "memory", "note", found, "Not all fit at once: set `load: on_demand` for some of them."
        )
    return Finding("memory", "ok", found)


def _free_memory() -> int | None:
    """Bytes that programs could have now; None where the system does not say."""
    try:
        if sys.platform == "darwin":
            told = subprocess.run(["vm_stat"], capture_output=True, text=True, check=True).stdout
            pages = re.findall(r"^Pages (?:free|inactive|speculative):\s+(\d+)", told, re.MULTILINE)
            return sum(map(int, pages)) * int(re.findall(r"page size of (\d+)", told)[0])
        told = Path("/proc/meminfo").read_text()
        return 1024 * int(re.findall(r"^MemAvailable:\s+(\d+) kB", told, re.MULTILINE)[0])
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def _port(settings: Settings) -> Finding:
    import socket
    from urllib.parse import urlsplit

    from emlxd.cli.client import Client

    client = Client(server_url(settings.server))
    try:
        socket.create_connection((urlsplit(client.url).hostname, settings.server.port), timeout=2).close()
    except OSError:
        return Finding("port", "ok", f"nothing listens at {client.url}")
    if client.healthy():
        return Finding("port", "ok", f"emlxd answers at {client.url}")
    return Finding(
        "port", "bad", f"another program answers at {client.url}", "Set server.port to another one."
    )


def _service(config: Path, settings: Settings) -> Finding:
    from emlxd.service.definition import define
    from emlxd.service.launchctl import LaunchAgent
    from emlxd.service.systemd import UserUnit

    name = "launchd" if sys.platform == "darwin" else "systemd"
    manager = (LaunchAgent if name == "launchd" else UserUnit)(define(config, settings))
    if not manager.file.exists():
        return Finding(name, "ok", f"not installed; `emlxd {name} install` starts emlxd with your login")
    try:
        return Finding(name, "ok", manager.status().splitlines()[0])
    except UserError as error:
        return Finding(name, "note", error.message)
