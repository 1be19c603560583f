"""The prefix cache on disk: K/V and states in files, which survive a restart. Nothing here is ever fatal."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger(__name__)

CHECKSUM_BYTES: Final = 16
MOST_UNWRITTEN: Final = 64  # blocks; what comes while so many wait is not kept


class DiskCache:
    """Blocks by key, at most ``max_bytes`` of files in all, the least recently used going first.

    The files of a model lie in ``folder / name / fingerprint``. Other fingerprints of the name are those of
    former files, dtypes or versions, and are removed. A file begins with a checksum of what follows; one that
    does not fit is a miss. Reading is for one thread; writing happens on a thread of its own.
    """

    def __init__(self, folder: Path, name: str, fingerprint: str, max_bytes: int) -> None:
        self._folder = folder.expanduser() / name.replace("/", "--") / fingerprint
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._lock = threading.Lock()
        self._unwritten = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"disk-{name}")
        try:
            self._open()
        except OSError as error:
            self._give_up(error)

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
            os.utime(self._path(key))
        except OSError:
            content = b""
        block = content[CHECKSUM_BYTES:]
        if content[:CHECKSUM_BYTES] == _checksum(block):
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
            part = self._path(key).with_suffix(".part")
            part.write_bytes(_checksum(block) + block)
            part.replace(self._path(key))
            with self._lock:
                self._sizes[key] = size
        except OSError as error:
            self._give_up(error)
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
        self._path(key).unlink(missing_ok=True)

    def _give_up(self, error: OSError) -> None:
        """A full or broken disk: go on with what is there, and say so."""
        log.warning("prefix cache: disk", folder=str(self._folder), error=str(error))

    def _path(self, key: bytes) -> Path:
        return self._folder / key.hex()


def _checksum(block: bytes) -> bytes:
    return hashlib.blake2b(block, digest_size=CHECKSUM_BYTES).digest()
