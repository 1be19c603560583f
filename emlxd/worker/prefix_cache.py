"""Which blocks of tokens are in the prefix cache, and where: plain Python on hashes and ids."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from emlxd.graph.batch import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Saving:
    """Blocks that are new: the sequence's block number ``first`` and those after it go to ``blocks``."""

    first: int
    blocks: list[int]
    keys: list[bytes]


class PrefixCache:
    """Least recently used blocks make room for new ones; a hit makes a block recent.

    A block is known by its key, one of ``BlockKeys``.
    ``query_tokens`` and ``hit_tokens`` count what was looked up and what was found.
    """

    def __init__(self, blocks: int) -> None:
        self._free = list(range(blocks))
        self._blocks: OrderedDict[bytes, int] = OrderedDict()
        self.query_tokens = 0
        self.hit_tokens = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, keys: Sequence[bytes], tokens: int) -> list[int]:
        """The first blocks of ``keys``, as far as they are there, looked up for so many ``tokens``."""
        known = keys[: self.known(keys)]
        self._refresh(known)
        self.query_tokens += tokens
        self.hit_tokens += len(known) * BLOCK_TOKENS
        return [self._blocks[key] for key in known]

    def insert(self, keys: Sequence[bytes]) -> Saving | None:
        """Makes room for those of the blocks that are not there yet."""
        known = self.known(keys)
        # The beginning must not be evicted for the sake of its own continuation.
        room = len(self._free) + len(self._blocks) - known
        new = list(keys[known : known + room])
        self._refresh(keys[:known])
        if not new:
            return None
        blocks = [self._take() for _ in new]
        # Added last block first: a block is useless once one before it is gone, so it goes first.
        for key, block in reversed(list(zip(new, blocks, strict=True))):
            self._blocks[key] = block
        self._refresh(keys[:known])
        return Saving(known, blocks, new)

    def known(self, keys: Sequence[bytes]) -> int:
        """How many of the first blocks are there."""
        return next((number for number, key in enumerate(keys) if key not in self._blocks), len(keys))

    def where(self, key: bytes) -> int | None:
        """The block of a key, if it is still there."""
        return self._blocks.get(key)

    def clear(self) -> None:
        """Forgets every block."""
        self._free += self._blocks.values()
        self._blocks.clear()

    def _refresh(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        return self._blocks.popitem(last=False)[1]


class Checkpoints:
    """Which recurrent states are kept, and at which place; the least recently used one makes room."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._places: OrderedDict[bytes, int] = OrderedDict()
        self.lent: set[int] = set()
        self._free = list(range(room))

    def find(self, key: bytes) -> int | None:
        """Where the state of a key is. Makes it recent."""
        if key in self._places:
            self._places.move_to_end(key)
        return self._places.get(key)

    def where(self, key: bytes) -> int | None:
        """The same without making it recent."""
        return self._places.get(key)

    def add(self, key: bytes) -> int | None:
        """A place for a state. None if it has one, or if there is no room."""
        if self.find(key) is not None or not (self._free or self._places):
            return None
        self._places[key] = self._take()
        return self._places[key]

    def lend(self) -> int | None:
        """A place for a state whose key is not known yet: its tokens are not read. None if half are lent."""
        if len(self.lent) >= self._room // 2:
            return None
        place = self._take()
        self.lent.add(place)
        return place

    def keep(self, place: int, key: bytes) -> bool:
        """Keeps the state in a lent place under ``key``. False, and the place is free, if that has one."""
        self.take_back(place)
        if self.find(key) is not None:
            return False
        self._free.remove(place)
        self._places[key] = place
        return True

    def take_back(self, place: int) -> None:
        """Ends the loan of a place, if it is lent."""
        if place in self.lent:
            self.lent.remove(place)
            self._free.append(place)

    def clear(self) -> None:
        """Forgets every state, and what was lent."""
        self._places.clear()
        self.lent.clear()
        self._free = list(range(self._room))

    def _take(self) -> int:
        return self._free.pop() if self._free else self._places.popitem(last=False)[1]


class BlockKeys:
    """What the blocks of one text are known by: hashes over their tokens and all before them.

    So equal keys mean equal K/V. Whatever else makes K/V differ for equal tokens, as an adapter does, is in
    ``seed``.
    """

    def __init__(self, seed: bytes = b"") -> None:
        self._keys: list[bytes] = []
        self._last = seed

    def of(self, tokens: Sequence[int]) -> list[bytes]:
        """A key for each whole block of ``tokens``, which are what was given before, or less, or more."""
        count = len(tokens) // BLOCK_TOKENS
        for number in range(len(self._keys), count):
            block = tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
            digest = hashlib.blake2b(self._last + array("i", block).tobytes(), digest_size=16)
            self._last = digest.digest()
            self._keys.append(self._last)
        return self._keys[:count]
