"""Opens a model as its YAML entry asks: checks what it asks against the files, loads, allocates."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path

from emlxd.config import ModelSettings
from emlxd.graph.checkpoint import open_checkpoint
from emlxd.graph.context_length import context_of
from emlxd.graph.device import current_device
from emlxd.graph.families import spec_of
from emlxd.graph.loader import load_transformer
from emlxd.graph.runner import MlxRunner
from emlxd.graph.weights import Quantization


def open_runner(
    path: Path,
    settings: ModelSettings,
    end_tokens: Collection[int] = (),
    turn: AbstractContextManager[None] | None = None,
) -> MlxRunner:
    """Loads the model in this thread, which must be the one that runs it, in ``turn`` with others.

    Its adapters' sources are folders. Raises ModelFormatError.
    """
    checkpoint = open_checkpoint(path)
    limit = spec_of(checkpoint.config, str(path)).max_position
    max_context = context_of(settings, path, limit)
    device = current_device()
    model = load_transformer(
        checkpoint,
        device,
        max_context=max_context,
        dtype=settings.dtype,
        weights=settings.weights,
        quantize=quantization_of(settings),
        compile=settings.compile,
        adapters=adapter_folders(settings),
        step_tokens=step_tokens(settings),
        turn=turn,
    )
    fused = None
    if settings.compile:
        fused = device.fused_decoder(model, slots=settings.slots, max_context=max_context)
    return MlxRunner(
        model,
        slots=settings.slots,
        max_context=max_context,
        compile=settings.compile,
        end_tokens=end_tokens,
        prefix_cache_bytes=settings.prefix_cache.bytes,
        fused=fused,
        turn=turn,
    )


def step_tokens(settings: ModelSettings) -> int:
    """The most tokens that a step computes for a row: a chunk of a prompt, or a draft after a token."""
    return max(settings.prefill_chunk, settings.speculative.max_draft + 1)


def adapter_folders(settings: ModelSettings) -> list[Path]:
    """Where the adapters are, in the order of their numbers, from 1 on."""
    return [adapter.source.path for adapter in settings.adapters if adapter.source.path]


def quantization_of(settings: ModelSettings) -> Quantization | None:
    """What dense weights become on load."""
    wanted = settings.quantize
    return Quantization(wanted.group_size, wanted.bits) if wanted else None
