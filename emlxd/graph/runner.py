"""Runs a model's steps on the device: the one object of ``graph`` that a worker talks to."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, cast

import mlx.core as mx

from emlxd.graph.adapters import SlotAdapters
from emlxd.graph.batch import Begin, PrefillRow
from emlxd.graph.block_pool import BlockPool, block_bytes
from emlxd.graph.cuda.fused_decoder import FusedDecoder
from emlxd.graph.device_memory import out_of_memory
from emlxd.graph.kv_cache import KVCache
from emlxd.graph.pending import Pending
from emlxd.graph.prefill import place_of, score, tokens_of
from emlxd.graph.sampling import Logprobs, logprobs, sample
from emlxd.graph.slots import SlotSampling
from emlxd.graph.state_pool import StatePool, state_bytes
from emlxd.graph.step import DecodeSteps, Sampled, StepRows
from emlxd.graph.step_positions import StepPositions
from emlxd.graph.transformer import Transformer

PORTION: Final = 1 << 26  # bytes that are made at once, which takes a CPU tens of milliseconds


class MlxRunner:
    """A model, its cache and its compiled steps. Use it only on the thread that made it."""

    def __init__(
        self,
        model: Transformer,
        *,
        slots: int,
        max_context: int,
        compile: bool,
        end_tokens: Collection[int] = (),
        prefix_cache_bytes: int = 0,
        fused: FusedDecoder | None = None,
        turn: AbstractContextManager[None] | None = None,
    ) -> None:
        """Allocates its caches in ``turn`` with what others compute.

        ``ring`` is how many of the last positions of a slot every layer still has, None for all of them.

        ``slack`` is how many more positions a slot may have written after one from which another sequence can
        still go on.
        """
        rings = [(layer.ring, layer.window) for layer in model.spec.layers if layer.ring and layer.window]
        self.ring = min((ring for ring, _ in rings), default=None)
        self.slack = min((ring - window for ring, window in rings), default=max_context)
        self.slots = slots
        self.max_context = max_context
        self._model = model
        self._end_tokens = end_tokens
        self._prefix_cache_bytes = prefix_cache_bytes
        self._steps = DecodeSteps(model, compile=compile, fused=fused)
        self._fused_bytes = fused.nbytes if fused else 0
        self._allocate(turn or nullcontext())

    def reset(self) -> None:
        """Forgets all sequences and blocks, as is needed after a step has failed half-way."""
        # First: the step may have failed because there is no room for twice as much.
        del self._cache, self._states, self._pool, self._forwarded
        mx.clear_cache()
        self._allocate(nullcontext())

    def _allocate(self, turn: AbstractContextManager[None]) -> None:
        self._cache = KVCache(self._model.spec, self.slots, self.max_context, self._model.dtype)
        checkpoints = _checkpoints(self._cache, self._prefix_cache_bytes)
        self._states = StatePool(self._cache, checkpoints)
        self._pool = BlockPool(self._cache, self._prefix_cache_bytes - self._states.nbytes)
        self._sampling = SlotSampling(self.slots, self.vocab_size, self._end_tokens)
        self._adapters = SlotAdapters(self.slots)
        self._tokens = mx.zeros((self.slots,), mx.int32)
        self._positions = StepPositions()
        self._forwarded: tuple[mx.array, mx.array] | None = None
        for arrays in _portions([*self._cache.arrays, *self._states.state(), *self._pool.state()]):
            with turn:  # all at once would hold others up for as long as it takes to fill gigabytes
                mx.eval(arrays)

    @property
    def architecture(self) -> str:
        return self._model.spec.architecture

    @property
    def vocab_size(self) -> int:
        return self._model.spec.vocab_size

    @property
    def weight_bytes(self) -> int:
        return self._model.nbytes + self._fused_bytes

    def bytes_read(self, rows: int) -> int:
        """Of the weights, by a decode step of so many rows."""
        return self._model.bytes_read(rows)

    @property
    def cache_bytes(self) -> int:
        return self._cache.nbytes

    @property
    def prefix_cache_bytes(self) -> int:
        return self._pool.nbytes + self._states.nbytes

    @property
    def blocks(self) -> int:
        """How many blocks the prefix cache has room for."""
        return self._pool.blocks

    @property
    def recurrent(self) -> bool:
        """Whether some layers carry a state, which can only be taken up where a checkpoint was kept."""
        return self._states.checkpoint_bytes > 0

    @property
    def checkpoints(self) -> int:
        """How many states the prefix cache has room for."""
        return self._states.checkpoints

    @property
    def checkpoint_bytes(self) -> int:
        return self._states.checkpoint_bytes

    @property
    def traces(self) -> int:
        """How often a part of a decode step was traced; once a shape when all is well."""
        return self._steps.traces

    def prefill(self, rows: Sequence[PrefillRow]) -> Pending:
        """Runs pieces of prompts side by side, padded to the longest. One token a row that has ``begin``."""
        place = place_of(rows, self._cache)
        if place.length > self.slack + 1:
            raise ValueError(f"{place.length} tokens in one step, but there is room for {self.slack + 1}")
        self._cache.give_states(self.slots)
        for row in rows:
            self._adapters.set(row.slot, row.adapter)
        hidden = self._model.prefill(tokens_of(rows), place, self._cache.layers)
        scores = [score(self._model, hidden[index], row.targets) for index, row in enumerate(rows)]
        barrier = hidden[:, -1, :1]
        last = [(index, row.slot, row.begin) for index, row in enumerate(rows) if row.begin]
        if not last:
            self._dispatch(barrier)
            return Pending([], [], scores=scores, barrier=barrier)
        ends = mx.array([len(rows[index].tokens) - 1 for index, _, _ in last], dtype=mx.int32)
        at = mx.array([index for index, _, _ in last], dtype=mx.int32)
        positions = place.starts[at] + ends
        begins = [(slot, begin) for _, slot, begin in last]
        first, found = self._begin(begins, self._model.logits(hidden[at, ends]), positions)
        self._dispatch(barrier, first)
        return Pending([first], [begin.sampling.logprobs for _, begin in begins], found, scores, barrier)

    def _begin(
        self, begins: Sequence[tuple[int, Begin]], logits: mx.array, positions: mx.array
    ) -> tuple[mx.array, Logprobs | None]:
        """Samples the first token of every row and sets its slot up for decoding."""
        slots = [slot for slot, _ in begins]
        for slot, begin in begins:
            self._sampling.begin(slot, begin)
        masks = [begin.allowed for _, begin in begins]
        mode = self._sampling.mode(slots).with_mask(any(masks))
        at = mx.array(slots)
        own = {
            name: array if name == "ends" else array[at]
            for name, array in self._sampling.arrays(mode).items()
        }
        if mode.masked:
            own["allowed"] = self._mask_array(masks)
        tokens = sample(logits, positions, own, mode)
        self._set_tokens(slots, tokens)
        self._sampling.count(slots, tokens)
        return tokens, logprobs(logits, tokens) if mode.logprobs else None

    def decode(self, positions: Sequence[int | None]) -> Pending:
        """One step for slots 0..n-1; ``positions[i]`` is where slot i's pending token is written.

        None is a slot that does not decode, idle or in the middle of its prompt. Its row is computed all the
        same and writes at the last position, which a sequence reads only in the step that writes it; its
        states stay as they are.
        """
        mode = self._sampling.mode(slice(0, len(positions)))
        slots = self._sampling.arrays(mode)
        sampled, after = self._steps.step(mode, self._rows(positions), self._tokens, slots, self._cache)
        self._positions.advance(after)
        return self._sampled(sampled, len(positions), after)

    def forward(self, positions: Sequence[int | None]) -> None:
        """The first half of ``decode``, for steps whose masks are still being computed."""
        rows = self._rows(positions)
        logits = self._steps.forward(rows, self._tokens, self._cache)
        self._forwarded = (logits, rows.positions)
        self._dispatch(logits)

    def sample(self, allowed: Sequence[bytes | None]) -> Pending:
        """The second half: ``allowed`` holds each row's mask, as in ``Begin``."""
        if self._forwarded is None:
            raise RuntimeError("sample follows forward")
        logits, at = self._forwarded
        self._forwarded = None
        mode = self._sampling.mode(slice(0, len(allowed))).with_mask(True)
        padded = [*allowed, *[None] * (at.shape[0] - len(allowed))]
        slots = self._sampling.arrays(mode) | {"allowed": self._mask_array(padded)}
        sampled = self._steps.sample(mode, logits, self._tokens, at, slots)
        return self._sampled(sampled, len(allowed))

    def verify(
        self, positions: Sequence[int], drafts: Sequence[Sequence[int]], width: int
    ) -> list[list[int]]:
        """One step for slots 0..n-1, all of which decode, that may yield up to ``width`` + 1 tokens for each.

        ``drafts[i]``, at most ``width`` long, guesses what follows slot i's pending token. Waits for the
        step and gives each slot's tokens: exactly those that as many plain steps would have sampled. Not for
        slots whose sampling depends on the tokens between: with penalties, log-probabilities or masks.
        """
        mode = self._sampling.mode(slice(0, len(positions)))
        # Idle rows write where nothing is kept: no slot is in the middle of its prompt.
        rows = self._rows(positions, idle_at=0, width=width + 1)
        padded = [[*draft, *[-1] * (width - len(draft))] for draft in drafts]
        padded += [[-1] * width] * (rows.count - len(drafts))
        self._tokens, sampled = self._steps.verify(
            mode,
            rows,
            self._tokens,
            mx.array(padded, dtype=mx.int32),
            self._sampling.arrays(mode),
            self._cache,
        )
        self._dispatch(sampled)
        rows_read = cast("list[list[int]]", sampled.tolist())
        return [_agreed(draft, row) for draft, row in zip(drafts, rows_read, strict=False)]

    def _sampled(self, sampled: Sampled, rows: int, *state: mx.array) -> Pending:
        self._tokens = sampled.tokens
        self._sampling.replace_counts(sampled.counts)
        found = sampled.logprobs
        likely = [found.chosen, found.top_tokens, found.top] if found else []
        self._dispatch(*state, *sampled.parts, *likely)
        return Pending(sampled.parts, [self._sampling.params(slot).logprobs for slot in range(rows)], found)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copies the K/V of a slot's first ``tokens`` positions, and its states, to another slot."""
        self._cache.copy(source, target, tokens)

    def move(self, source: int, target: int, tokens: int) -> None:
        """Moves a running sequence, ``tokens`` positions long, to another slot."""
        self._cache.copy(source, target, tokens)
        self._set_tokens([target], self._tokens[source : source + 1])
        self._sampling.move(source, target)
        self._adapters.move(source, target)

    def release(self, slot: int) -> None:
        """The slot's sequence has ended."""
        self._sampling.release(slot)
        self._adapters.set(slot, 0)

    def save_blocks(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Copies a slot's tokens, from its block number ``first`` on, to the prefix cache's ``blocks``."""
        self._pool.save(self._cache, slot, first, blocks)
        mx.async_eval(*self._pool.state())  # type: ignore[no-untyped-call]

    def load_blocks(self, slot: int, blocks: Sequence[int]) -> None:
        """Copies blocks of the prefix cache to the beginning of a slot."""
        self._pool.load(self._cache, slot, blocks)
        self._dispatch()

    def out_of_memory(self, error: Exception) -> bool:
        """Whether MLX raised ``error`` because the device's memory is full."""
        return out_of_memory(error)

    @property
    def block_bytes(self) -> int:
        return self._pool.block_bytes

    def read_block(self, block: int) -> bytes:
        """The content of a block of the prefix cache. Waits for the device."""
        return self._pool.read(block)

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Puts back what ``read_block`` gave, here or in another process with the same model."""
        self._pool.write(blocks, contents)
        mx.async_eval(*self._pool.state())  # type: ignore[no-untyped-call]

    def save_state(self, slot: int, checkpoint: int) -> None:
        """Copies a slot's states, as the steps so far leave them, to the prefix cache."""
        self._states.save(self._cache, slot, checkpoint)
        mx.async_eval(*self._states.state())  # type: ignore[no-untyped-call]

    def load_state(self, slot: int, checkpoint: int) -> None:
        """Copies states of the prefix cache to a slot."""
        self._states.load(self._cache, slot, checkpoint)
        self._dispatch()

    def read_state(self, checkpoint: int) -> bytes:
        """The content of a checkpoint. Waits for the device."""
        return self._states.read(checkpoint)

    def write_state(self, checkpoint: int, content: bytes) -> None:
        """Puts back what ``read_state`` gave, here or in another process with the same model."""
        self._states.write(checkpoint, content)
        mx.async_eval(*self._states.state())  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Frees the model. The thread's streams go too: MLX aborts if the process ends before they do."""
        mx.synchronize()
        vars(self).clear()
        gc.collect()  # compiled steps refer to themselves
        mx.clear_cache()
        mx.clear_streams()

    def _dispatch(self, *results: mx.array) -> None:
        """Starts computing. All state is among it: what nobody evaluates piles up, a buffer a step."""
        state = [self._tokens, *self._cache.arrays, *self._sampling.state()]
        mx.async_eval(*results, *state)  # type: ignore[no-untyped-call]

    def _set_tokens(self, slots: Sequence[int], tokens: mx.array) -> None:
        """Replaced, not written to: a step in flight is still to be read from the old array."""
        self._tokens = mx.put_along_axis(self._tokens, mx.array(list(slots)), tokens, axis=0)

    def _rows(self, positions: Sequence[int | None], idle_at: int | None = None, width: int = 1) -> StepRows:
        """The rows of a step that writes ``width`` tokens from ``positions`` on, idle ones elsewhere."""
        scratch = self.max_context - 1 if idle_at is None else idle_at
        padded = [*positions, *[None] * (self._bucket(len(positions)) - len(positions))]
        at = [scratch if position is None else position for position in padded]
        lengths = [0 if position is None else 1 for position in padded]
        longest = max(position for position in positions if position is not None)
        self._cache.give_states(len(padded))
        return StepRows(
            self._cache.window(longest + width),
            *self._positions.arrays(at, lengths),
            adapters=self._adapters.rows(len(padded)),
        )

    def _bucket(self, rows: int) -> int:
        bucket = 1
        while bucket < rows:
            bucket *= 2
        return min(bucket, self.slots)

    def _mask_array(self, masks: Sequence[bytes | None]) -> mx.array:
        """uint32 [b, words]; a row without a mask allows everything."""
        words = -(-self.vocab_size // 32)
        every = b"\xff" * (4 * words)
        joined = memoryview(b"".join(every if mask is None else mask for mask in masks))
        return mx.array(joined).view(mx.uint32).reshape(len(masks), words)  # type: ignore[arg-type]


def _portions(arrays: Sequence[mx.array]) -> Iterator[list[mx.array]]:
    """Some of them at a time, of ``PORTION`` bytes or one array."""
    some: list[mx.array] = []
    for array in arrays:
        if some and sum(one.nbytes for one in some) + array.nbytes > PORTION:
            yield some
            some = []
        some.append(array)
    yield some


def _checkpoints(cache: KVCache, nbytes: int) -> int:
    """How many states the prefix cache keeps: at most as many as blocks, in at most half of its bytes."""
    state = state_bytes(cache)
    return min(nbytes // (2 * state), nbytes // (state + block_bytes(cache))) if state else 0


def _agreed(draft: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The sampled tokens up to the first that was not drafted."""
    right = next((n for n, token in enumerate(draft) if token != sampled[n]), len(draft))
    return list(sampled[: right + 1])
