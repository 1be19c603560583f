"""A model's files, a GGUF file or a Hugging Face folder, seen through one small interface."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from emlxd.errors import ModelFormatError
from emlxd.graph.folder import FolderCheckpoint
from emlxd.graph.gguf import GgufFile
from emlxd.graph.gguf_checkpoint import GgufCheckpoint
from emlxd.graph.weights import Weight


class Checkpoint(Protocol):
    """A model on disk. Names are those of ``names.py``; ``take`` hands out each tensor once."""

    path: Path

    @property
    def config(self) -> Mapping[str, Any]:
        """What config.json says, or would say."""

    @property
    def converted(self) -> bool:
        """Whether mlx-lm has written it, which changes more than names in some families."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor ``name``, such as ``model.norm.weight``."""

    def take(self, name: str, dense: mx.Dtype | None = None) -> Weight | None:
        """The tensor ``name`` as it is stored, or in the type ``dense``; None if it is missing."""

    def stored_name(self, name: str) -> str:
        """What this file calls it, for messages."""

    def leftovers(self) -> list[str]:
        """Names of the tensors that nobody took and that hold weights."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens ``path``. Raises ModelFormatError when it is no model that emlxd can read."""
    if path.is_dir():
        return FolderCheckpoint(path)
    if path.is_file():
        return GgufCheckpoint(GgufFile(path))
    raise ModelFormatError(f"{path}: no such file or folder, expected a GGUF file or a model folder")
