"""The engine of one model: schedule, run, receive, one step after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Protocol

from emlxd.core import Failed, TokenLogprob
from emlxd.errors import EmlxdError, RequestTimedOut
from emlxd.graph.batch import BLOCK_TOKENS, PrefillRow, StepOutput
from emlxd.worker.disk_cache import DiskCache
from emlxd.worker.mailbox import Mailbox
from emlxd.worker.meters import Meters
from emlxd.worker.pacer import PrefillPacer
from emlxd.worker.prefix_cache import PrefixCache, block_keys
from emlxd.worker.scheduler import Chunk, Scheduler
from emlxd.worker.sequence import Sequence

UNLIMITED: Final = 1 << 30
SPILLED_A_STEP: Final = 2  # blocks


class Pending(Protocol):
    """A step that runs on the device."""

    def read(self) -> StepOutput:
        """Waits for the step."""


class Runner(Protocol):
    """What the engine needs of the device. ``graph.runner.MlxRunner`` is the real one and explains it."""

    @property
    def blocks(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def traces(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def cache_bytes(self) -> int: ...
    @property
    def prefix_cache_bytes(self) -> int: ...
    def prefill(self, rows: Rows[PrefillRow]) -> Pending: ...
    def decode(self, positions: Rows[int | None]) -> Pending: ...
    def forward(self, positions: Rows[int | None]) -> None: ...
    def sample(self, allowed: Rows[bytes | None]) -> Pending: ...
    def verify(self, positions: Rows[int], drafts: Rows[Rows[int]], width: int) -> list[list[int]]: ...
    def copy(self, source: int, target: int, tokens: int) -> None: ...
    def move(self, source: int, target: int, tokens: int) -> None: ...
    def release(self, slot: int) -> None: ...
    def save_blocks(self, slot: int, first: int, blocks: Rows[int]) -> None: ...
    def load_blocks(self, slot: int, blocks: Rows[int]) -> None: ...
    def read_block(self, block: int) -> bytes: ...
    def write_blocks(self, blocks: Rows[int], contents: Rows[bytes]) -> None: ...
    def reset(self) -> None: ...
    def out_of_memory(self, error: Exception) -> bool: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Flight:
    """A dispatched step and the sequences that its tokens belong to. ``chunks`` is what it prefills."""

    pending: Pending
    rows: Rows[Sequence | None]
    chunks: Rows[Chunk] = ()


class Engine:
    """Runs sequences through a runner. Lives on one thread; tests drive it without any."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        pacer: PrefillPacer,
        mailbox: Mailbox,
        now: Callable[[], float] = time.monotonic,
        max_draft: int = 0,
        timeout: float = 0.0,
        disk: DiskCache | None = None,
    ) -> None:
        """``max_draft`` is the length of the drafts that are checked, 0 is no speculation.

        ``timeout`` is how many seconds a request may take from its arrival on, 0 is for ever.
        """
        self._runner = runner
        self._scheduler = scheduler
        self._pacer = pacer
        self._mailbox = mailbox
        self._now = now
        self._max_draft = max_draft
        self._timeout = timeout
        self._disk = disk
        self._unspilled: list[bytes] = []
        self._requests: dict[str, list[Sequence]] = {}
        self._flights: list[Flight] = []  # of the step before
        self._launched: list[Flight] = []  # of this step
        self._ended: list[Sequence] = []
        self._free_since = 0.0
        self.prefixes = PrefixCache(runner.blocks)
        self.meters = Meters()

    @property
    def idle(self) -> bool:
        return self._scheduler.idle and not self._flights and not self._unspilled

    @property
    def running(self) -> int:
        """Answers that have a slot."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Answers that wait for a slot."""
        return len(self._scheduler.waiting)

    @property
    def kv_tokens(self) -> int:
        """Positions of the K/V cache that are written."""
        return sum(sequence.written for sequence in self._scheduler.running.copy())

    @property
    def request_ids(self) -> list[str]:
        return list(self._requests)

    def add(self, answers: Rows[Sequence]) -> None:
        """Queues the answers of one request."""
        self._requests[answers[0].request.id] = list(answers)
        for sequence in answers:
            self._scheduler.add(sequence)

    def cancel(self, request_id: str) -> None:
        """Ends a request without a word; unknown ids have ended already."""
        for sequence in self._requests.get(request_id, []).copy():
            self._end(sequence)
        self._free_slots()

    def step(self) -> None:
        """At most one slice of prefill and one decode step.

        Both are dispatched before the tokens of the step before are read, so that the device computes
        while the host detokenizes.
        """
        self._end_late_requests()
        self._admit()
        if self._speculate():
            return
        self._launch_prefill()
        self._launch_decode()
        self._receive(self._flights)
        self._flights, self._launched = self._launched, []
        self._free_slots()
        self._spill()
        self._mailbox.flush()

    def _end_late_requests(self) -> None:
        """Requests arrive in order, so the first that has time left ends the search."""
        if not self._timeout:
            return
        latest = self._now() - self._timeout
        late = takewhile(lambda answers: answers[0].clock.arrived < latest, self._requests.values())
        ids = [answers[0].request.id for answers in late]
        self._fail(ids, RequestTimedOut(f"The answer took longer than {self._timeout:g} seconds."))
        self._free_slots()

    def _speculate(self) -> bool:
        """Takes a step that checks drafts, if enough answers have one. It is read at once for its length."""
        running = self._scheduler.running
        if not all(sequence.can_draft(self._max_draft) for sequence in running):
            return False
        lookups = [sequence.lookup for sequence in running if sequence.lookup]
        resting = [lookup.resting() for lookup in lookups]
        if all(resting):
            return False
        self.settle()
        drafts = [sequence.draft() for sequence in running]
        if not running or 2 * sum(map(bool, drafts)) < len(drafts):
            for lookup in lookups:
                lookup.learn(0)
            return False
        found = self._runner.verify([sequence.written for sequence in running], drafts, self._max_draft)
        now = self._free_since = self._now()
        self.meters.step_batch_size.observe(len(drafts))
        for sequence, tokens in zip(running, found, strict=True):
            sequence.dispatched += len(tokens)
            if sequence.lookup:
                sequence.lookup.learn(len(tokens) - 1)
            for token in tokens:
                if not sequence.ended:
                    self._accept(sequence, token, None, now)
        self._free_slots()
        self._mailbox.flush()
        return True

    def settle(self) -> None:
        """Receives all that is in flight, so that nothing of this model runs on the device."""
        self._receive_all()
        self._free_slots()
        self._mailbox.flush()

    def fail_all(self, error: EmlxdError) -> None:
        """Ends every request with ``error``."""
        self._fail(list(self._requests), error)
        self._free_slots()
        self._mailbox.flush()

    def recover(self, error: EmlxdError, *, shed: bool) -> None:
        """Starts anew after a step has failed: what was on the device is lost.

        Who was running fails with ``error``; with ``shed`` only the newest does, to make room, and the others
        are computed again. Raises what the runner raises if it cannot go on.
        """
        running = sorted(self._scheduler.running, key=lambda sequence: sequence.order)
        failing = running[-1:] if shed else running
        self._flights, self._launched = [], []
        self._runner.reset()
        self.prefixes.clear()
        self._unspilled.clear()
        self._fail([sequence.request.id for sequence in failing], error)
        self._free_slots()
        self._mailbox.flush()
        self._scheduler.requeue()

    def _admit(self) -> None:
        for sequence in self._scheduler.admit():
            sequence.clock.admitted = sequence.clock.admitted or self._now()
            if sequence.leader is None:
                self._reuse_blocks(sequence)
        for sequence in self._scheduler.running:
            if sequence.leader and sequence.prefilled == 0 and not sequence.waits_for_leader:
                self._reuse_leader(sequence, sequence.leader)

    def _reuse_blocks(self, sequence: Sequence) -> None:
        """Copies what the prefix cache knows of the prompt, instead of computing it."""
        if sequence.scores_prompt:
            return
        blocks = self.prefixes.match(sequence.context)
        blocks += self._blocks_from_disk(sequence.context, len(blocks))
        if blocks:
            self._runner.load_blocks(sequence.slot, blocks)
            sequence.prefilled = sequence.cached = len(blocks) * BLOCK_TOKENS

    def _blocks_from_disk(self, tokens: Rows[int], known: int) -> list[int]:
        """Brings blocks after the first ``known`` from the disk to the prefix cache."""
        if self._disk is None:
            return []
        found: list[bytes] = []
        for key in block_keys(tokens[:-1])[known:]:
            if (block := self._disk.get(key)) is None or len(block) != self._runner.block_bytes:
                break
            found.append(block)
        saving = self.prefixes.insert(tokens[: (known + len(found)) * BLOCK_TOKENS]) if found else None
        if saving is None:
            return []
        self._runner.write_blocks(saving.blocks, found[: len(saving.blocks)])
        return saving.blocks

    def _reuse_leader(self, sequence: Sequence, leader: Sequence) -> None:
        """Copies the prompt of another answer to it; its last token is computed, for what follows it."""
        known = len(sequence.request.prompt) - 1
        if leader.running and known:
            self._runner.copy(leader.slot, sequence.slot, known)
            sequence.prefilled = known
        else:
            self._reuse_blocks(sequence)

    def _launch_prefill(self) -> None:
        chunks = self._scheduler.prefill(self._pacer.tokens if self._scheduler.decoding else UNLIMITED)
        if not chunks:
            return
        if not self._flights:
            self._free_since = self._now()
        pending = self._runner.prefill([_prefill_row(chunk) for chunk in chunks])
        complete = [chunk.sequence for chunk in chunks if chunk.last]
        for sequence in complete:
            self._remember(sequence, sequence.context)
        self._launched.append(Flight(pending, [s for s in complete if s.request.max_tokens], chunks))

    def _launch_decode(self) -> None:
        rows = self._scheduler.decode()
        if not rows:
            return
        positions = [row.position if row else None for row in rows]
        sequences = [row.sequence if row else None for row in rows]
        self.meters.step_batch_size.observe(len(rows) - sequences.count(None))
        if any(sequence and sequence.output.guarded for sequence in sequences):
            # Masks depend on the tokens before: these are read while the device is at the forward pass.
            self._runner.forward(positions)
            self._receive_all()
            pending = self._runner.sample([self._mask(sequence) for sequence in sequences])
        else:
            pending = self._runner.decode(positions)
        self._launched.append(Flight(pending, sequences))

    def _mask(self, sequence: Sequence | None) -> bytes | None:
        if sequence is None or sequence.ended:
            return None
        try:
            return sequence.output.mask()
        except EmlxdError as error:
            self._fail([sequence.request.id], error)
            return None

    def _receive_all(self) -> None:
        self._receive([*self._flights, *self._launched])
        self._flights, self._launched = [], []

    def _receive(self, flights: Iterable[Flight]) -> None:
        for flight in flights:
            output = flight.pending.read()
            now = self._now()
            self._pacer.observe(sum(chunk.count for chunk in flight.chunks), now - self._free_since)
            self._free_since = now
            self._receive_prompts(flight, output, now)
            logprobs = output.logprobs or [None] * len(flight.rows)
            for token, sequence, logprob in zip(output.tokens, flight.rows, logprobs, strict=True):
                if sequence and not sequence.ended:
                    self._accept(sequence, token, logprob, now)

    def _receive_prompts(self, flight: Flight, output: StepOutput, now: float) -> None:
        """Delivers prompts' log-probabilities, and ends who asked for no more."""
        for row, chunk in enumerate(flight.chunks):
            sequence = chunk.sequence
            if sequence.ended:
                continue
            if sequence.scores_prompt:
                sequence.scores += output.scores[row]
            if not chunk.last:
                continue
            if sequence.scores_prompt:
                self._mailbox.put(sequence.generation, sequence.scored())
            if not sequence.request.max_tokens:
                sequence.clock.first_token = now
                self._mailbox.put(sequence.generation, sequence.finished("length", now))
                self._end(sequence)

    def _accept(self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float) -> None:
        if not sequence.answer:
            sequence.clock.first_token = now
        else:
            self.meters.inter_token_seconds.observe(now - sequence.clock.last_token)
        sequence.clock.last_token = now
        try:
            pieces, reason = sequence.accept(token, logprob)
        except EmlxdError as error:
            self._fail([sequence.request.id], error)
            return
        for piece in pieces:
            self._mailbox.put(sequence.generation, piece)
        if reason:
            self._mailbox.put(sequence.generation, sequence.finished(reason, now))
            # The last token has no K/V yet: nobody asked the model what follows it.
            self._remember(sequence, (*sequence.request.prompt, *sequence.answer[:-1]))
            self._end(sequence)

    def _remember(self, sequence: Sequence, tokens: Rows[int]) -> None:
        """Leaves the K/V of a sequence's ``tokens`` to the prefix cache."""
        saving = self.prefixes.insert(tokens)
        if saving:
            self._runner.save_blocks(sequence.slot, saving.first, saving.blocks)
            if self._disk:
                self._unspilled += saving.keys

    def _spill(self) -> None:
        """Hands a few new blocks to the disk: reading one from the device takes a moment."""
        some, self._unspilled = self._unspilled[:SPILLED_A_STEP], self._unspilled[SPILLED_A_STEP:]
        for key in some:
            if self._disk and (block := self.prefixes.where(key)) is not None:
                self._disk.put(key, self._runner.read_block(block))

    def _fail(self, request_ids: Iterable[str], error: EmlxdError) -> None:
        for request_id in dict.fromkeys(request_ids):
            answers = self._requests[request_id].copy()
            self._mailbox.put(answers[0].generation, Failed(error))
            for sequence in answers:
                self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """What the step in flight still brings for it is dropped on arrival."""
        sequence.ended = True
        self._ended.append(sequence)
        answers = self._requests[sequence.request.id]
        answers.remove(sequence)
        if not answers:
            del self._requests[sequence.request.id]

    def _free_slots(self) -> None:
        """Frees the slots of those that have ended. Not between a forward pass and its sampling."""
        for sequence in self._ended:
            slot = sequence.slot
            move = self._scheduler.remove(sequence)
            if move:
                self._runner.move(move.source, move.target, move.tokens)
            elif slot >= 0:
                self._runner.release(slot)
        self._ended.clear()


def _prefill_row(chunk: Chunk) -> PrefillRow:
    sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.count
    return PrefillRow(
        slot=sequence.slot,
        start=start,
        tokens=sequence.context[start:end],
        begin=sequence.begin() if chunk.last and sequence.request.max_tokens else None,
        targets=sequence.context[start + 1 : end + 1] if sequence.scores_prompt else (),
    )
