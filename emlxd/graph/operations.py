"""Counts the operations that are given to the device, whoever gives them."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten

# Primitives that show an array's memory in another way, and compute nothing.
VIEWS: Final = frozenset(
    (
        *("AsStrided", "Broadcast", "BroadcastAxes", "Copy", "Depends", "ExpandDims"),
        *("Flatten", "NumberOfElements", "Reshape", "Slice", "Split", "Squeeze"),
        *("StopGradient", "Transpose", "Unflatten", "View"),
    )
)
_PRIMITIVE: Final = re.compile(r'\[label ="(\w+).*?", shape=rectangle\]')


@contextmanager
def counted_operations() -> Iterator[list[int]]:
    """A list that gets the number of operations of each ``mx.async_eval`` until the block ends."""
    original, counts = mx.async_eval, []

    def counting(*arrays: Any) -> None:
        counts.append(operations(list(dict(tree_flatten(arrays)).values())))
        original(*arrays)  # type: ignore[no-untyped-call]

    mx.async_eval = counting
    try:
        yield counts
    finally:
        mx.async_eval = original


def operations(arrays: list[mx.array]) -> int:
    """How many operations it takes to compute ``arrays``; fused ones are one, and views are none.

    Not quite kernels, which MLX does not count: an operation may be more than one, or copy its input first.
    """
    return sum(name not in VIEWS for name in primitives(arrays))


def primitives(arrays: list[mx.array]) -> list[str]:
    """What MLX calls each operation and view that it takes to compute ``arrays``."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return _PRIMITIVE.findall(graph.getvalue())
