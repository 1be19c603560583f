"""Model files of Hugging Face repositories."""

from __future__ import annotations

import errno
import glob
import io
from pathlib import Path
from typing import Any

from emlxd.config import Source
from emlxd.downloads.cache import Progress, cache_dir, sha256_of, wrong_checksum
from emlxd.errors import SourceError

MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]

# Folders that are not downloaded: all but those that sentence-transformers numbers, such as 1_Pooling.
OTHER_FOLDERS = ["[!0-9]*/*", "?[!_]*/*"]


def from_hub(source: Source, report: Progress) -> Path:
    """The file of the source, or its whole repository. Raises SourceError, and OSError for a full disk."""
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
        found = sha256_of(path, report)
        if found != source.sha256.lower():
            path.resolve().unlink()  # the snapshot holds a link to the file
            path.unlink(missing_ok=True)
            raise wrong_checksum(source, found)
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
