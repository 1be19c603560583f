"""The prefix cache on disk: capped, checked, and never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from emlxd.worker.disk_cache import CHECKSUM_BYTES, DiskCache

BLOCK = b"k" * 100
FILE = CHECKSUM_BYTES + len(BLOCK)


def key(number: int) -> bytes:
    return bytes([number]) * 16


def filled(folder: Path, *numbers: int, cap: int = 1 << 20, fingerprint: str = "v1") -> DiskCache:
    cache = DiskCache(folder, "org/model", fingerprint, cap)
    for number in numbers:
        cache.put(key(number), BLOCK)
    cache.close()
    return cache


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_is_put_is_there_after_a_restart(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2)
    again = DiskCache(tmp_path, "org/model", "v1", 1 << 20)
    assert again.get(key(1)) == again.get(key(2)) == BLOCK
    assert again.get(key(3)) is None


def test_the_cap_holds_on_every_write_and_the_oldest_goes(tmp_path: Path) -> None:
    cache = filled(tmp_path, 1, 2, 3, cap=2 * FILE)
    assert [cache.get(key(number)) is not None for number in (1, 2, 3)] == [False, True, True]
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 2 * FILE


def test_a_hit_keeps_a_block(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2)
    cache = DiskCache(tmp_path, "org/model", "v1", 2 * FILE)
    cache.get(key(1))
    cache.put(key(3), BLOCK)
    cache.close()
    assert cache.get(key(1)) and not cache.get(key(2))


def test_the_cap_holds_at_the_start(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2, 3)
    cache = DiskCache(tmp_path, "org/model", "v1", FILE)
    assert cache.nbytes == FILE and len(files(tmp_path)) == 1


def test_a_block_larger_than_the_cap_is_not_kept(tmp_path: Path) -> None:
    filled(tmp_path, 1, cap=FILE - 1)
    assert files(tmp_path) == []


def test_files_of_another_version_are_removed_and_of_another_model_left(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    other = DiskCache(tmp_path, "other", "v1", 1 << 20)
    other.put(key(9), BLOCK)
    other.close()
    cache = filled(tmp_path, 2, fingerprint="v2")
    assert cache.get(key(1)) is None
    assert {path.name for path in files(tmp_path)} == {key(2).hex(), key(9).hex()}


@pytest.mark.parametrize("content", [b"", b"short", b"x" * FILE])
def test_a_damaged_file_is_a_miss_and_goes(tmp_path: Path, content: bytes) -> None:
    filled(tmp_path, 1)
    (file,) = files(tmp_path)
    file.write_bytes(content)
    cache = DiskCache(tmp_path, "org/model", "v1", 1 << 20)
    assert cache.get(key(1)) is None
    assert files(tmp_path) == []


def test_a_file_that_has_gone_is_a_miss(tmp_path: Path) -> None:
    cache = filled(tmp_path, 1)
    files(tmp_path)[0].unlink()
    assert cache.get(key(1)) is None


def test_a_file_that_goes_while_the_folder_is_read_hides_no_other(tmp_path: Path) -> None:
    """While a model is replaced by itself with other settings, the old one still writes and removes files."""
    filled(tmp_path, 1, 2)
    (files(tmp_path)[0].parent / "gone.part").symlink_to("renamed")
    cache = DiskCache(tmp_path, "org/model", "v1", 1 << 20)
    assert cache.get(key(1)) == cache.get(key(2)) == BLOCK


def test_half_written_files_are_removed(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    (file,) = files(tmp_path)
    file.with_suffix(".part").write_bytes(BLOCK)
    filled(tmp_path)
    assert files(tmp_path) == [file]


def test_a_folder_that_cannot_be_used_is_only_a_cache_that_misses(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = filled(tmp_path / "file", 1)
    assert cache.get(key(1)) is None
