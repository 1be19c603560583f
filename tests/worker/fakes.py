"""A runner without a device: what it is told to do is checked, what it answers is a rule."""

from __future__ import annotations

import asyncio
import queue
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from emlxd.core import TokenLogprob
from emlxd.graph.batch import BLOCK_TOKENS, PrefillRow, StepOutput
from emlxd.text.tokenizer import Tokenizer
from emlxd.text.vocabulary import Vocabulary
from emlxd.worker.model_thread import ModelThread

# (prompt and answer so far) -> next token
Rule = Callable[[Sequence[int]], int]
VOCAB = 128

LETTERS = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz.")}
END = LETTERS["."]


def letters_tokenizer() -> Tokenizer:
    backend = Backend(models.BPE(vocab=LETTERS, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(Vocabulary(backend, bos_id=None, eos_ids=frozenset({END})))


def end_as_it_is_asked(worker: ModelThread[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the next message on nobody reads what ``worker`` is sent. Undone, it can be closed."""
    alive = iter([True, False])
    monkeypatch.setattr(type(worker), "alive", property(lambda self: next(alive)))
    monkeypatch.setattr(worker, "_inbox", queue.SimpleQueue())


class FakePending:
    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def read(self) -> StepOutput:
        return self._output


class FakeRunner:
    """Keeps each slot's tokens as the cache would, so that a wrong slot or position cannot go unseen.

    With ``recurrent`` it also keeps what each slot's state stands for: a step must find the state of exactly
    the tokens before it.
    """

    def __init__(
        self,
        slots: int,
        rule: Rule,
        *,
        max_context: int = 4096,
        blocks: int = 0,
        recurrent: bool = False,
        checkpoints: int = 0,
    ) -> None:
        self.max_context = max_context
        self.blocks = blocks
        self.recurrent = recurrent
        self.checkpoints = checkpoints
        self.state: list[list[int]] = [[] for _ in range(slots)]
        self.kept_states: dict[int, list[int]] = {}
        self.saved: dict[int, list[int]] = {}
        self.copied: list[int] = []
        self.verified = 0
        self.traces = 1
        self.ring: int | None = None
        self.slack = max_context
        self.weight_bytes, self.cache_bytes, self.prefix_cache_bytes = 1000, 200, 30
        self.cache: list[list[int]] = [[] for _ in range(slots)]
        self.next: list[int] = [0] * slots
        self.prefills: list[int] = []
        self.batches: list[int] = []
        self._forwarded: Sequence[int | None] | None = None
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
            self._advance(row.slot, row.start, row.tokens)
            if row.begin is not None:
                assert (*row.begin.prompt, *row.begin.answer) == tuple(cache)
                self.next[row.slot] = self._choose(cache, row.begin.allowed)
                tokens.append(self.next[row.slot])
        scores = [
            [TokenLogprob(target, -1.0, ((0, -0.5), (1, -2.0))) for target in row.targets] for row in rows
        ]
        return FakePending(StepOutput(tokens, [TokenLogprob(token, -0.5) for token in tokens], scores))

    def decode(self, positions: Sequence[int | None]) -> FakePending:
        self.forward(positions)
        return self.sample([None] * len(positions))

    def forward(self, positions: Sequence[int | None]) -> None:
        self._maybe_fail()
        assert self._forwarded is None
        assert positions[-1] is not None, "no row beyond the last that decodes"
        self.batches.append(len(positions))
        self._forwarded = positions
        for slot, position in enumerate(positions):
            if position is not None:
                assert position < self.max_context
                self.cache[slot][position:] = [self.next[slot]]
                self._advance(slot, position, [self.next[slot]])
                assert len(self.cache[slot]) == position + 1, "K/V is written without a gap"

    def sample(self, allowed: Sequence[bytes | None]) -> FakePending:
        positions, self._forwarded = self._forwarded, None
        assert positions is not None and len(positions) == len(allowed)
        tokens = []
        for slot, position in enumerate(positions):
            if position is not None:
                self.next[slot] = self._choose(self.cache[slot], allowed[slot])
            tokens.append(self.next[slot] if position is not None else -1)
        return FakePending(StepOutput(tokens, [TokenLogprob(token, -0.5) for token in tokens]))

    def verify(
        self, positions: Sequence[int], drafts: Sequence[Sequence[int]], width: int
    ) -> list[list[int]]:
        self._maybe_fail()
        self.verified += 1
        found = []
        for slot, (position, draft) in enumerate(zip(positions, drafts, strict=True)):
            assert len(draft) <= width and len(self.cache[slot]) >= position
            cache = self.cache[slot]
            cache[position:] = [self.next[slot]]
            tokens = [self._rule(cache)]
            for guess in draft:
                if guess != tokens[-1]:
                    break
                cache.append(guess)
                tokens.append(self._rule(cache))
            self._advance(slot, position, cache[position:])
            self.next[slot] = tokens[-1]
            found.append(tokens)
        return found

    def _advance(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        if start == 0:
            self.state[slot] = []
        if self.recurrent:
            assert self.state[slot] == self.cache[slot][:start], "a state is that of the tokens before"
        self.state[slot] = [*self.state[slot], *tokens]

    def copy(self, source: int, target: int, tokens: int) -> None:
        assert source >= 0 and target >= 0, "both have a slot"
        assert tokens <= len(self.cache[source])
        self.cache[target] = self.cache[source][:tokens]
        self.state[target] = self.state[source]
        self.copied.append(tokens)

    def move(self, source: int, target: int, tokens: int) -> None:
        assert self._forwarded is None, "nobody moves between a forward pass and its sampling"
        assert tokens <= len(self.cache[source])
        self.cache[target] = self.cache[source][:tokens]
        self.state[target] = self.state[source]
        self.next[target] = self.next[source]

    def release(self, slot: int) -> None:
        assert slot < len(self.cache)

    def save_blocks(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        for number, block in enumerate(blocks, first):
            assert 0 <= block < self.blocks
            self.saved[block] = self.cache[slot][number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
            assert len(self.saved[block]) == BLOCK_TOKENS, "only what is computed is saved"

    def load_blocks(self, slot: int, blocks: Sequence[int]) -> None:
        self.cache[slot] = [token for block in blocks for token in self.saved[block]]

    block_bytes = 4 * BLOCK_TOKENS

    def read_block(self, block: int) -> bytes:
        return array("i", self.saved[block]).tobytes()

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        for block, content in zip(blocks, contents, strict=True):
            self.saved[block] = list(array("i", content))

    checkpoint_bytes = 4

    def save_state(self, slot: int, checkpoint: int) -> None:
        assert 0 <= checkpoint < self.checkpoints
        self.kept_states[checkpoint] = self.state[slot]

    def load_state(self, slot: int, checkpoint: int) -> None:
        self.state[slot] = self.kept_states[checkpoint]

    def read_state(self, checkpoint: int) -> bytes:
        return array("i", [hash(tuple(self.kept_states[checkpoint])) & 0xFFFF]).tobytes()

    def write_state(self, checkpoint: int, content: bytes) -> None:
        raise NotImplementedError("no test brings states back from a disk to a fake")

    def reset(self) -> None:
        self.state = [[] for _ in self.cache]
        self.kept_states.clear()
        self.cache = [[] for _ in self.cache]
        self.saved.clear()
        self._forwarded = None

    def out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, MemoryError)

    def _choose(self, cache: Sequence[int], allowed: bytes | None) -> int:
        token = self._rule(cache)
        while allowed is not None and not allowed[token // 8] >> token % 8 & 1:
            token = (token + 1) % VOCAB
        return token

    def close(self) -> None:
        self.closed = True

    def _maybe_fail(self) -> None:
        if self.fail_next:
            error, self.fail_next = self.fail_next, None
            raise error


async def assert_freed_in_turn(worker: Any, runner: Any) -> None:
    """Closes ``worker`` during another's turn at the device: its model stays until that is over."""
    with worker._gate:
        closing = asyncio.create_task(worker.close())
        while not worker._gate.waiting:
            assert not closing.done()
            await asyncio.sleep(0)
        assert not runner.closed
    await closing
    assert runner.closed
