"""A runner without a device: what it is told to do is checked, what it answers is a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emlxd.graph.batch import PrefillRow

# (prompt and answer so far) -> next token
Rule = Callable[[Sequence[int]], int]


class FakePending:
    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def read(self) -> list[int]:
        return self._tokens


class FakeRunner:
    """Keeps each slot's tokens as the cache would, so that a wrong slot or position cannot go unseen."""

    def __init__(self, slots: int, rule: Rule, *, max_context: int = 4096) -> None:
        self.max_context = max_context
        self.cache: list[list[int]] = [[] for _ in range(slots)]
        self.next: list[int] = [0] * slots
        self.prefills: list[int] = []
        self.batches: list[int] = []
        self.fail_next: Exception | None = None
        self.closed = False
        self._rule = rule

    def prefill(self, rows: Sequence[PrefillRow]) -> FakePending:
        self._maybe_fail()
        assert len({row.slot for row in rows}) == len(rows)
        self.prefills.append(max(len(row.tokens) for row in rows) * len(rows))
        tokens = []
        for row in rows:
            cache = self.cache[row.slot]
            assert row.start <= len(cache), "a prompt continues where it stopped"
            cache[row.start :] = row.tokens
            if row.sampling is not None:
                self.next[row.slot] = self._rule(cache)
                tokens.append(self.next[row.slot])
        return FakePending(tokens)

    def decode(self, positions: Sequence[int | None]) -> FakePending:
        self._maybe_fail()
        assert positions[-1] is not None, "no row beyond the last that decodes"
        self.batches.append(len(positions))
        tokens = []
        for slot, position in enumerate(positions):
            if position is None:
                tokens.append(-1)
                continue
            assert position < self.max_context
            self.cache[slot][position:] = [self.next[slot]]
            assert len(self.cache[slot]) == position + 1, "K/V is written without a gap"
            self.next[slot] = self._rule(self.cache[slot])
            tokens.append(self.next[slot])
        return FakePending(tokens)

    def move(self, source: int, target: int, tokens: int) -> None:
        assert tokens <= len(self.cache[source]) or tokens == len(self.cache[source])
        self.cache[target] = self.cache[source][:tokens]
        self.next[target] = self.next[source]

    def release(self, slot: int) -> None:
        self.cache[slot] = self.cache[slot][:]

    def close(self) -> None:
        self.closed = True

    def _maybe_fail(self) -> None:
        if self.fail_next:
            error, self.fail_next = self.fail_next, None
            raise error
