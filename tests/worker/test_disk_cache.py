"""The prefix cache on disk: capped, checked, and never in the way."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import structlog

from emlxd.worker.disk_cache import CHECKSUM_BYTES, UNUSED, DiskCache, folder_name

BLOCK = b"k" * 100
FILE = CHECKSUM_BYTES + len(BLOCK)


def key(number: int) -> bytes:
    return bytes([number]) * 16


FINGERPRINT = "f1" * 12


def filled(
    folder: Path,
    *numbers: int,
    cap: int = 1 << 20,
    fingerprint: str = FINGERPRINT,
    name: str = "org/model",
) -> DiskCache:
    cache = DiskCache(folder, name, fingerprint, cap)
    for number in numbers:
        cache.put(key(number), BLOCK)
    cache.close()
    return cache


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_is_put_is_there_after_a_restart(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2)
    again = DiskCache(tmp_path, "org/model", FINGERPRINT, 1 << 20)
    assert again.get(key(1)) == again.get(key(2)) == BLOCK
    assert again.get(key(3)) is None


def test_the_cap_holds_on_every_write_and_the_oldest_goes(tmp_path: Path) -> None:
    cache = filled(tmp_path, 1, 2, 3, cap=2 * FILE)
    assert [cache.get(key(number)) is not None for number in (1, 2, 3)] == [False, True, True]
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 2 * FILE


def test_a_hit_keeps_a_block(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2)
    cache = DiskCache(tmp_path, "org/model", FINGERPRINT, 2 * FILE)
    cache.get(key(1))
    cache.put(key(3), BLOCK)
    cache.close()
    assert cache.get(key(1)) and not cache.get(key(2))


def test_the_cap_holds_at_the_start(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2, 3)
    cache = DiskCache(tmp_path, "org/model", FINGERPRINT, FILE)
    assert cache.nbytes == FILE and len(files(tmp_path)) == 1


def test_a_block_larger_than_the_cap_is_not_kept(tmp_path: Path) -> None:
    filled(tmp_path, 1, cap=FILE - 1)
    assert files(tmp_path) == []


def test_files_of_another_version_are_removed_and_of_another_model_left(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    filled(tmp_path, 9, name="other")
    cache = filled(tmp_path, 2, fingerprint="f2" * 12)
    assert cache.get(key(1)) is None
    assert {path.name for path in files(tmp_path)} == {key(2).hex(), key(9).hex()}


def test_names_that_differ_in_case_or_signs_alone_have_folders_of_their_own(tmp_path: Path) -> None:
    """Most Macs' file systems take `Foo` and `foo` for one folder, and `a/b` cannot be the name of one."""
    names = ["a/b", "a--b", "a:b", "A/b", "foo", "Foo", "m" * 300, "m" * 301]
    for name in names:
        filled(tmp_path, 1, name=name)
    assert len({folder.name.casefold() for folder in tmp_path.iterdir()}) == len(names)
    assert all(DiskCache(tmp_path, name, FINGERPRINT, 1 << 20).get(key(1)) == BLOCK for name in names)


def age(folder: Path, seconds: float) -> None:
    for path in (folder, *folder.rglob("*")):
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))


def test_a_model_that_nobody_uses_any_more_is_removed_in_time(tmp_path: Path) -> None:
    """Also one in a folder of another naming, as earlier versions had."""
    for number, name in enumerate(("gone", "read", "opened", "new")):
        filled(tmp_path, number, name=name)
    (tmp_path / folder_name("gone")).rename(tmp_path / "org--gone")
    age(tmp_path, UNUSED + 60)
    os.utime(next(file for file in files(tmp_path) if file.name == key(1).hex()))
    filled(tmp_path, name="opened")
    filled(tmp_path, 4, name="new")
    assert {folder.name for folder in tmp_path.iterdir()} == {
        folder_name(name) for name in ("read", "opened", "new")
    }


def test_nothing_is_removed_that_is_not_of_the_cache(tmp_path: Path) -> None:
    """The folder is what the configuration says, which may be one with other things in it."""
    for file in ("letters/2019/1.txt", "photos/abc", f"mixed/{FINGERPRINT}/notes", f"{FINGERPRINT}/1"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("mine")
    mine = files(tmp_path)
    age(tmp_path, 2 * UNUSED)
    filled(tmp_path)
    assert files(tmp_path) == mine


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, "org/model", FINGERPRINT, 1 << 20)
    (tmp_path / folder_name("org/model") / FINGERPRINT).rmdir()
    cache.put(key(1), BLOCK)
    cache.close()
    assert cache.get(key(1)) == BLOCK


@pytest.mark.parametrize("content", [b"", b"short", b"x" * FILE])
def test_a_damaged_file_is_a_miss_and_goes(tmp_path: Path, content: bytes) -> None:
    filled(tmp_path, 1)
    (file,) = files(tmp_path)
    file.write_bytes(content)
    cache = DiskCache(tmp_path, "org/model", FINGERPRINT, 1 << 20)
    assert cache.get(key(1)) is None
    assert files(tmp_path) == []


def test_a_file_that_has_gone_is_a_miss(tmp_path: Path) -> None:
    cache = filled(tmp_path, 1)
    files(tmp_path)[0].unlink()
    assert cache.get(key(1)) is None


def test_a_disk_that_has_become_read_only_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    cache = filled(tmp_path, 1, 2)
    files(tmp_path)[0].write_bytes(b"damaged")
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert {cache.get(key(1)), cache.get(key(2))} == {BLOCK, None}


def test_a_full_disk_keeps_no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    filled(tmp_path, 1)
    assert files(tmp_path) == []


def test_a_file_that_goes_while_the_folder_is_read_hides_no_other(tmp_path: Path) -> None:
    """While a model is replaced by itself with other settings, the old one still writes and removes files."""
    filled(tmp_path, 1, 2)
    (files(tmp_path)[0].parent / "gone.part").symlink_to("renamed")
    cache = DiskCache(tmp_path, "org/model", FINGERPRINT, 1 << 20)
    assert cache.get(key(1)) == cache.get(key(2)) == BLOCK


def test_half_written_files_are_removed(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    (file,) = files(tmp_path)
    file.with_suffix(".part").write_bytes(BLOCK)
    filled(tmp_path)
    assert files(tmp_path) == [file]


def test_a_folder_that_cannot_be_used_is_only_a_cache_that_misses(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with structlog.testing.capture_logs() as lines:
        cache = filled(tmp_path / "file", 1)
    assert cache.get(key(1)) is None
    assert "cannot be used" in lines[0]["event"] and "Not a directory" in lines[0]["error"]
