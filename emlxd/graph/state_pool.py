"""Memory of the prefix cache for recurrent states, as they were at the ends of some blocks."""

from __future__ import annotations

import mlx.core as mx

from emlxd.graph.kv_cache import KVCache
from emlxd.graph.pool_rows import put_row, row_bytes


class StatePool:
    """For every state of every layer [checkpoints, ...]."""

    def __init__(self, cache: KVCache, checkpoints: int) -> None:
        self.checkpoints = checkpoints
        self.checkpoint_bytes = state_bytes(cache)
        self._pools = [
            mx.zeros((checkpoints, *state.shape[1:]), state.dtype) for state in cache.states() if checkpoints
        ]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools)

    def save(self, cache: KVCache, slot: int, checkpoint: int) -> None:
        """Copies a slot's states to ``checkpoint``."""
        for pool, state in zip(self._pools, cache.states_of(slot), strict=True):
            pool[checkpoint] = state

    def load(self, cache: KVCache, slot: int, checkpoint: int) -> None:
        """Copies the states of ``checkpoint`` to a slot."""
        for pool, state in zip(self._pools, cache.states(), strict=True):
            state[slot] = pool[checkpoint]

    def read(self, checkpoint: int) -> bytes:
        """One checkpoint's bytes, layer after layer."""
        return row_bytes(self._pools, checkpoint)

    def write(self, checkpoint: int, content: bytes) -> None:
        """Puts back what ``read`` gave."""
        put_row(self._pools, checkpoint, content)

    def state(self) -> list[mx.array]:
        """What must be evaluated after ``save`` and ``write``."""
        return self._pools


def state_bytes(cache: KVCache) -> int:
    """Those of one slot's states."""
    return sum(state.nbytes // state.shape[0] for state in cache.states())
