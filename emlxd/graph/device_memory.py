"""How much memory the device has, how much MLX holds of it, and the limits that MLX is given."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import mlx.core as mx

from emlxd.graph.device import current_device

# What MLX's allocators and drivers say; MLX has no exception type of its own for it.
OUT_OF_MEMORY: Final = (
    "out of memory",
    "insufficient memory",
    "unable to allocate",
    "[malloc",
    "out_of_memory",
)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes that MLX holds in this process: in arrays now and at most, and freed but kept for reuse."""

    active: int
    peak: int
    cached: int


def memory_use() -> MemoryUse:
    return MemoryUse(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory())


def memory_total() -> int:
    """Bytes that the device has for models: on Metal what Apple recommends, on a CPU all of the machine's."""
    info = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if key in info:
            return int(info[key])
    return _machine_memory()


def _machine_memory() -> int:
    """The machine's memory, or what a container may use of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(limit.read_text()))
    return total


def limit_memory(budget: int, buffer_cache: int) -> None:
    """Keeps MLX's freed buffers to ``buffer_cache`` bytes, and on macOS the budget's memory resident."""
    mx.set_cache_limit(buffer_cache)
    if current_device().kind == "metal":
        mx.set_wired_limit(min(budget, memory_total()))


def out_of_memory(error: Exception) -> bool:
    """Whether MLX raised ``error`` because the device's memory is full."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(sign in text for sign in OUT_OF_MEMORY)
