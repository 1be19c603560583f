"""A change of the file is noticed however it is made."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from emlxd.reload import watch
from emlxd.reload.watch import changes, fingerprint, watched_folders


class Watching:
    """The file's content at each that ``changes`` yields; None where there was no file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def run(self) -> None:
        async for _ in changes(self._path, fingerprint(self._path)):
            self._seen.put_nowait(self._path.read_bytes() if self._path.exists() else None)

    async def next(self) -> bytes | None:
        return await asyncio.wait_for(self._seen.get(), 30)

    @property
    def quiet(self) -> bool:
        return self._seen.empty()


@asynccontextmanager
async def watching(path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watching]:
    """Looks often, so that a test does not depend on when the watch began."""
    monkeypatch.setattr(watch, "DEBOUNCE", 20)
    monkeypatch.setattr(watch, "LOOK", 100)
    found = Watching(path)
    task = asyncio.create_task(found.run())
    await asyncio.sleep(0)
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.wait({task})


def write(path: Path) -> None:
    path.write_text("new")


def replace(path: Path) -> None:
    """As vim and most editors save."""
    part = path.with_name(".part")
    part.write_text("new")
    os.replace(part, path)


def remove_and_write(path: Path) -> None:
    path.unlink()
    path.write_text("new")


@pytest.mark.parametrize("save", [write, replace, remove_and_write])
async def test_a_saved_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[Path], None]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old")
    async with watching(path, monkeypatch) as found:
        save(path)
        assert await found.next() == b"new"
        (tmp_path / "other").write_text("x")
        path.write_text("newer")
        assert await found.next() == b"newer"


async def test_a_mounted_config_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes: config.yaml -> ..data/config.yaml, and ..data moves from one folder to the next."""
    for version in ("1", "2", "3"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "config.yaml").write_text(version)
    (tmp_path / "..data").symlink_to("1")
    path = tmp_path / "config.yaml"
    path.symlink_to("..data/config.yaml")
    async with watching(path, monkeypatch) as found:
        for version in ("2", "3"):
            (tmp_path / "..tmp").symlink_to(version)
            os.replace(tmp_path / "..tmp", tmp_path / "..data")
            assert await found.next() == version.encode()


async def test_a_link_to_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "links").mkdir()
    (tmp_path / "real" / "config.yaml").write_text("old")
    path = tmp_path / "links" / "config.yaml"
    path.symlink_to(tmp_path / "real" / "config.yaml")
    assert watched_folders(path) == sorted([(tmp_path / "links").resolve(), (tmp_path / "real").resolve()])
    async with watching(path, monkeypatch) as found:
        replace(tmp_path / "real" / "config.yaml")
        assert await found.next() == b"new"


async def test_a_folder_that_goes_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "config.yaml"
    path.write_text("old")
    async with watching(path, monkeypatch) as found:
        folder.rename(tmp_path / "away")
        folder.mkdir()
        path.write_text("new")
        assert await found.next() == b"new"


async def test_a_file_that_goes_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old")
    async with watching(path, monkeypatch) as found:
        path.unlink()
        assert await found.next() is None
        path.write_text("old")
        assert await found.next() == b"old"
        assert found.quiet


@pytest.mark.parametrize("error", [RuntimeError("no file descriptor is left"), FileNotFoundError("gone")])
async def test_a_file_that_cannot_be_watched_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*folders: Path, **options: object) -> None:
        raise error

    path = tmp_path / "config.yaml"
    path.write_text("old")
    monkeypatch.setattr(watch, "awatch", fail)
    with capture_logs() as logs:
        async with watching(path, monkeypatch) as found:
            for content in ("new", "newer"):
                path.write_text(content)
                assert await found.next() == content.encode()
    assert [entry["reason"] for entry in logs] == [str(error)]


async def test_folders_that_cannot_be_found_out_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> list[Path]:
        raise PermissionError("no way there")

    path = tmp_path / "config.yaml"
    path.write_text("old")
    monkeypatch.setattr(watch, "watched_folders", fail)
    async with watching(path, monkeypatch) as found:
        path.write_text("new")
        assert await found.next() == b"new"


async def test_the_same_content_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old")
    async with watching(path, monkeypatch) as found:
        path.write_text("old")
        replace(path)
        assert await found.next() == b"new"
        assert found.quiet


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert watched_folders(tmp_path / "a") == [tmp_path.resolve()]
