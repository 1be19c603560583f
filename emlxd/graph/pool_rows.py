"""Rows of several arrays as one run of bytes: a block or a checkpoint of the prefix cache, for its disk."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def row_bytes(pools: Sequence[mx.array], row: int) -> bytes:
    """The bytes of one row of each pool, one after the other. Waits for the device."""
    parts = [pool[row].flatten().view(mx.uint8) for pool in pools]
    return bytes(memoryview(mx.concatenate(parts)))  # type: ignore[arg-type]


def put_row(pools: Sequence[mx.array], row: int, content: bytes) -> None:
    """Puts back what ``row_bytes`` gave."""
    rest = mx.array(memoryview(content))  # type: ignore[arg-type]
    for pool in pools:
        size = pool.nbytes // pool.shape[0]
        pool[row] = rest[:size].view(pool.dtype).reshape(pool.shape[1:])
        rest = rest[size:]
