"""What a model's adapters say of their size, read from their headers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from emlxd.graph.adapter_files import read_adapter
from emlxd.graph.delta import LowRank
from emlxd.graph.spec import ModelSpec

# Projections of one input, which become one: what adapters add to them is as wide as all together.
_JOINED: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(slots=True)
class _Joined:
    """Projections that become one: the numbers for each rank, the outputs, and the largest rank of each."""

    per_rank: int
    outputs: int
    ranks: dict[str, int] = field(default_factory=dict)
    grows: bool = False

    @property
    def values(self) -> int:
        """How many numbers each adapter takes."""
        return sum(self.ranks.values()) * self.per_rank + self.grows * self.outputs


def adapter_values(paths: Sequence[Path], spec: ModelSpec) -> int:
    """How many numbers the adapters in ``paths`` take together. Raises ModelFormatError."""
    groups: dict[tuple[str, tuple[str, ...]], _Joined] = {}
    for path in paths:
        for module, part in read_adapter(path, len(spec.layers)).modules.items():
            layer, _, name = module.rpartition(".")
            names = next((names for names in _JOINED if name in names), (name,))
            group = groups.setdefault((layer, names), _joined(spec, names, part))
            # Queries and their gates go to different ends of what is joined, each with an A of its own.
            times = 2 if name == "q_proj" and spec.attention_gate else 1
            group.ranks[name] = max(group.ranks.get(name, 0), times * part.a.shape[-2])
            group.grows = group.grows or part.magnitude is not None
    return len(paths) * sum(group.values for group in groups.values())


def _joined(spec: ModelSpec, names: tuple[str, ...], part: LowRank) -> _Joined:
    outputs = part.b.shape[-2] * len(names)
    if "q_proj" in names:
        queries = 2 * spec.heads if spec.attention_gate else spec.heads
        outputs = (queries + 2 * spec.kv_heads) * spec.head_dim
    experts = math.prod(part.a.shape[:-2])
    return _Joined(experts * (part.a.shape[-1] + outputs), outputs)
