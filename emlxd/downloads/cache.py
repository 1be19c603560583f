"""The cache of downloads, which holds whole, verified files only.

A download becomes part of it by a record, which is written last and says what the files looked like; files
that match their record are not hashed again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from emlxd.config import Source
from emlxd.errors import SourceError

Progress = Callable[[str, int, int | None], None]
"""Called with what is happening, the bytes done, and their total if known; also from other threads."""

_CHUNK = 1 << 20


def cache_dir() -> Path:
    """Where downloads are kept: ``$EMLXD_CACHE``, or ``~/.cache/emlxd``."""
    return Path(os.environ.get("EMLXD_CACHE") or "~/.cache/emlxd").expanduser().absolute()


def key_of(source: Source) -> str:
    """What the files that concern ``source`` are called by."""
    return hashlib.sha256(source.model_dump_json().encode()).hexdigest()[:32]


def recorded_path(source: Source) -> Path | None:
    """The file or folder that was downloaded for ``source``, if it still is as it was recorded."""
    try:
        record = json.loads(_record_file(source).read_bytes())
        path = cache_dir() / record["path"]
        return path if record["files"] == _fingerprint(path) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_record(source: Source, path: Path) -> None:
    """Makes ``path``, which is whole and verified, a part of the cache."""
    record = _record_file(source)
    record.parent.mkdir(parents=True, exist_ok=True)
    part = record.with_suffix(".part")
    part.write_text(
        json.dumps({"path": str(path.relative_to(cache_dir())), "files": _fingerprint(path)}),
        encoding="utf-8",
    )
    os.replace(part, record)


def _record_file(source: Source) -> Path:
    return cache_dir() / "records" / f"{key_of(source)}.json"


def _fingerprint(path: Path) -> dict[str, list[int]]:
    """Size and modification time of the file, or of each file in the folder, by name."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if not file.is_dir()]
    stats = {file.name if file == path else str(file.relative_to(path)): file.stat() for file in files}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


@contextmanager
def lock(source: Source, report: Progress) -> Iterator[None]:
    """Held by the one process that downloads this source. The system lets go of it when a process dies."""
    path = cache_dir() / "locks" / f"{key_of(source)}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process to download it", 0, None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def system_errors(source: Source) -> Iterator[None]:
    """Turns the system's errors into SourceError."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise SourceError(f"{source}: the disk is full; make room in {cache_dir()}") from None
        raise SourceError(
            f"{source}: {error}; EMLXD_CACHE can name another folder than {cache_dir()}"
        ) from None


def wrong_checksum(source: Source, found: str) -> SourceError:
    return SourceError(
        f"{source}: wrong SHA-256: expected {source.sha256}, got {found}; the file was deleted"
    )


def sha256_of(path: Path, report: Progress) -> str:
    """That of a file, or of a folder as ``folder_sha256`` has it."""
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file()]
        return folder_sha256({str(file.relative_to(path)): sha256_of(file, report) for file in files})
    with path.open("rb") as file:
        return copy_hashed(file, None, path.stat().st_size, f"verifying {path.name}", report)


def folder_sha256(files: Mapping[str, str]) -> str:
    """That of what sha256sum prints for the files of a folder, sorted by name."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def copy_hashed(file: IO[bytes], output: IO[bytes] | None, size: int, what: str, report: Progress) -> str:
    """Read ``file`` to its end, into ``output`` if there is one. Returns the SHA-256."""
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
        if output is not None:
            output.write(chunk)
        report(what, file.tell(), size)
    return digest.hexdigest()
