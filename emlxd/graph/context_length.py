"""How long a model's sequences may be."""

from __future__ import annotations

from pathlib import Path

from emlxd.config import ModelSettings
from emlxd.errors import ModelFormatError


def context_of(settings: ModelSettings, path: Path, limit: int, usual: int | None = None) -> int:
    """Tokens: what the entry asks for, else ``usual``, else the ``limit`` that the model was made for.

    Raises ModelFormatError for an entry that asks for more.
    """
    wanted = settings.max_context
    if wanted and wanted > limit:
        raise ModelFormatError(
            f"{path}: max_context is {wanted}, but the model was made for at most {limit} tokens"
        )
    return wanted or min(usual or limit, limit)
