"""Memory of the prefix cache: K/V of finished tokens in blocks, allocated once, copied to and from slots."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from emlxd.graph.batch import BLOCK_TOKENS
from emlxd.graph.kv_cache import KVCache
from emlxd.graph.pool_rows import put_row, row_bytes


class BlockPool:
    """For every layer keys and values [blocks, kv_heads, 64, head_dim], of rings too."""

    def __init__(self, cache: KVCache, nbytes: int) -> None:
        self.block_bytes = block_bytes(cache)
        self.blocks = nbytes // self.block_bytes if self.block_bytes else 0
        self._pools = [
            mx.zeros((self.blocks, layer.shape[1], BLOCK_TOKENS, layer.shape[3]), layer.dtype)
            for layer in cache.by_token
            if self.blocks
        ]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools)

    def save(self, cache: KVCache, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Copies a slot's tokens from block number ``first`` on into ``blocks``, if rings still have them."""
        ids = mx.array(list(blocks))
        start, count = first * BLOCK_TOKENS, len(blocks)
        for pool, layer, ring in zip(self._pools, cache.by_token, cache.rings, strict=True):
            if ring is None:
                tokens = layer[slot, :, start : start + count * BLOCK_TOKENS]
                found = tokens.reshape(layer.shape[1], count, BLOCK_TOKENS, -1)
            else:
                whole = layer[slot, :, :ring].reshape(layer.shape[1], -1, BLOCK_TOKENS, layer.shape[3])
                found = whole[:, mx.arange(first, first + count) % whole.shape[1]]
            pool[ids] = found.swapaxes(0, 1)

    def load(self, cache: KVCache, slot: int, blocks: Sequence[int]) -> None:
        """Copies ``blocks`` to the beginning of a slot; to a ring as many of the last as it has room for."""
        for pool, layer, ring in zip(self._pools, cache.by_token, cache.rings, strict=True):
            ids = mx.array(list(blocks) if ring is None else _in_ring(blocks, ring // BLOCK_TOKENS))
            tokens = pool[ids].swapaxes(0, 1).reshape(layer.shape[1], -1, layer.shape[3])
            layer[slot, :, : tokens.shape[1]] = tokens

    def read(self, block: int) -> bytes:
        """One block's bytes, layer after layer."""
        return row_bytes(self._pools, block)

    def write(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Puts back what ``read`` gave."""
        for block, content in zip(blocks, contents, strict=True):
            put_row(self._pools, block, content)

    def state(self) -> list[mx.array]:
        """What must be evaluated after ``save``."""
        return self._pools


def _in_ring(blocks: Sequence[int], room: int) -> list[int]:
    """The last ``room`` of the blocks in the order in which they lie in a ring: block n at n modulo room."""
    numbers = range(max(len(blocks) - room, 0), len(blocks))
    return [blocks[number] for number in sorted(numbers, key=lambda number: number % room)]


def block_bytes(cache: KVCache) -> int:
    """What all layers keep of 64 tokens."""
    return sum(BLOCK_TOKENS * layer.nbytes // (layer.shape[0] * layer.shape[2]) for layer in cache.by_token)
