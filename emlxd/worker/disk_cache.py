"""The prefix cache on disk: K/V and states in files, which survive a restart. Nothing here is ever fatal."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger(__name__)

CHECKSUM_BYTES: Final = 16
MOST_UNWRITTEN: Final = 64  # blocks; what comes while so many wait is not kept
UNUSED: Final = 30 * 86400.0  # seconds after which a model's folder goes that nobody has opened or read

_FINGERPRINT: Final = re.compile("[0-9a-f]{24}")
_BLOCK: Final = re.compile(r"[0-9a-f]{32,}(\.part)?")


class DiskCache:
    """Blocks by key, at most ``max_bytes`` of files in all, the least recently used going first.

    The files of a model lie in ``folder / folder_name(name) / fingerprint``. Other fingerprints of the name
    are those of former files, dtypes or versions, and are removed; so are models left ``UNUSED`` for long.
    A file begins with a checksum of what follows; one that does not fit is a miss. Reading is for one thread;
    writing happens on a thread of its own.
    """

    def __init__(self, folder: Path, name: str, fingerprint: str, max_bytes: int) -> None:
        self._folder = folder.expanduser() / folder_name(name) / fingerprint
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._lock = threading.Lock()
        self._unwritten = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"disk-{name}")
        try:
            self._open()
            remove_unused(self._folder.parent.parent, time.time() - UNUSED)
        except OSError as error:
            self._warn(error)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(self._sizes.values())

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return key in self._sizes

    def get(self, key: bytes) -> bytes | None:
        """The block, if it is there and whole."""
        with self._lock:
            if key not in self._sizes:
                return None
            self._sizes.move_to_end(key)
        try:
            content = self._path(key).read_bytes()
        except OSError:
            content = b""
        block = content[CHECKSUM_BYTES:]
        if content[:CHECKSUM_BYTES] == _checksum(block):
            with suppress(OSError):  # the disk may have become read-only
                os.utime(self._path(key))
            return block
        self._forget(key)
        return None

    def put(self, key: bytes, block: bytes) -> None:
        """Keeps a block; the file is written later."""
        with self._lock:
            if key in self._sizes or self._unwritten == MOST_UNWRITTEN:
                return
            self._unwritten += 1
        self._writer.submit(self._write, key, block)

    def close(self) -> None:
        """Waits for what is still to be written."""
        self._writer.shutdown()

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for sibling in self._folder.parent.iterdir():
            if sibling != self._folder:
                shutil.rmtree(sibling, ignore_errors=True)
        os.utime(self._folder)
        files = []
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # the worker that this one replaces may still be at it
                files.append((path.stat(), path))
        for stat, path in sorted(files, key=lambda file: file[0].st_mtime):
            try:
                self._sizes[bytes.fromhex(path.name)] = stat.st_size
            except ValueError:
                path.unlink(missing_ok=True)  # half-written, when the daemon was killed
        self._make_room(0)

    def _write(self, key: bytes, block: bytes) -> None:
        try:
            size = CHECKSUM_BYTES + len(block)
            if not self._make_room(size):
                return
            self._folder.mkdir(parents=True, exist_ok=True)  # another daemon may have found it unused
            part = self._path(key).with_suffix(".part")
            try:
                part.write_bytes(_checksum(block) + block)
                part.replace(self._path(key))
            except OSError:
                part.unlink(missing_ok=True)  # the disk may be full
                raise
            with self._lock:
                self._sizes[key] = size
        except OSError as error:
            self._warn(error)
        finally:
            with self._lock:
                self._unwritten -= 1

    def _make_room(self, size: int) -> bool:
        """Removes the oldest until ``size`` more bytes fit. False if they never will."""
        with self._lock:
            total, gone = sum(self._sizes.values()), []
            while self._sizes and total + size > self._max_bytes:
                key, freed = self._sizes.popitem(last=False)
                total -= freed
                gone.append(key)
        for key in gone:
            self._path(key).unlink(missing_ok=True)
        return total + size <= self._max_bytes

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._sizes.pop(key, None)
        with suppress(OSError):
            self._path(key).unlink()

    def _warn(self, error: OSError) -> None:
        """A full or broken disk: go on with what is there, and say so."""
        log.warning(
            "prefix cache: its disk folder cannot be used", folder=str(self._folder), error=str(error)
        )

    def _path(self, key: bytes) -> Path:
        return self._folder / key.hex()


def folder_name(model: str) -> str:
    """A name that no other model has, also where case is ignored. It begins with what people can read."""
    readable = re.sub("[^a-z0-9._-]", "-", model.lower())[:40]
    return f"{readable}-{hashlib.blake2b(model.encode(), digest_size=8).hexdigest()}"


def remove_unused(folder: Path, before: float) -> None:
    """Removes models whose blocks were not used since ``before``, in Unix seconds.

    The folder is the user's: what does not look like blocks of a model is left.
    """
    for model in folder.iterdir():
        fingerprints = [path for path in _entries(model) if _FINGERPRINT.fullmatch(path.name)]
        files = [file for path in fingerprints for file in _entries(path) if _BLOCK.fullmatch(file.name)]
        if fingerprints and all(_used(path) < before for path in (*fingerprints, *files)):
            for file in files:
                file.unlink(missing_ok=True)
            for path in (*fingerprints, model):
                with suppress(OSError):  # something else is in it
                    path.rmdir()


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()


def _checksum(block: bytes) -> bytes:
    return hashlib.blake2b(block, digest_size=CHECKSUM_BYTES).digest()
