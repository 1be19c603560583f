"""What models would take on this machine: joins their files, the device and ``emlxd.memory``'s arithmetic."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from emlxd import memory
from emlxd.config import MemorySettings, ModelSettings
from emlxd.graph import device_memory
from emlxd.graph.context_length import context_of
from emlxd.graph.device import current_device
from emlxd.graph.measure import measure
from emlxd.graph.measure_pooling import measure_pooling
from emlxd.graph.open import adapter_folders, quantization_of, step_tokens
from emlxd.graph.open_embedder import kind_of
from emlxd.graph.prefill import SCORED_AT_ONCE
from emlxd.memory import ComputeForm, Needs, Sizes
from emlxd.worker.packing import MAX_TOKENS, SLACK


def predict(settings: ModelSettings, path: Path) -> Needs:
    """The bytes that the model at ``path`` will take; its adapters' sources are folders.

    Reads headers alone. Raises ModelFormatError.
    """
    quantize = quantization_of(settings)
    pools = kind_of(settings, path) != "chat"
    adapters = adapter_folders(settings)
    facts = measure_pooling(path, quantize) if pools else measure(path, quantize, adapters)
    here = current_device()
    form = ComputeForm(
        itemsize=here.dtype(settings.dtype).size,
        keeps_quantized=here.keeps_quantized("keep" if quantize else settings.weights),
        fused_attention=here.gpu,
        decodes_fused=settings.compile and here.decodes_fused,
        expands=here.expand_from is not None,
    )
    max_context = context_of(settings, path, facts.max_position, facts.usual_context)
    if pools:
        return memory.pooling_needs(facts, max(round(MAX_TOKENS * SLACK), max_context), max_context, form)
    sizes = Sizes(
        slots=settings.slots,
        max_context=max_context,
        prefill_chunk=settings.prefill_chunk,
        step_tokens=step_tokens(settings),
        logit_rows=max(settings.slots * (settings.speculative.max_draft + 1), SCORED_AT_ONCE),
        prefix_cache=settings.prefix_cache.bytes,
    )
    return memory.needs(facts, sizes, form)


def budget(settings: MemorySettings) -> int:
    """Bytes that all models may take together."""
    return memory.budget_bytes(settings.budget, device_memory.memory_total())


def memory_use() -> dict[str, int]:
    """What MLX holds in this process: ``active`` and ``peak`` bytes of arrays, ``cached`` for reuse."""
    return asdict(device_memory.memory_use())


def apply_limits(settings: MemorySettings, activations: int = 0) -> None:
    """Tells MLX of the budget. Call it before anything is loaded, and again when something changes.

    ``activations`` are the bytes that loaded models are counted with for what their steps compute. What is
    free of them between two steps stays with MLX: getting fresh memory can take longer than a step.
    """
    device_memory.limit_memory(budget(settings), activations + settings.buffer_cache_bytes)
