"""The engine of one model: schedule, run, receive, one step after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from contextlib import suppress
from typing import Final

import structlog

from emlxd.core import Failed, TokenLogprob
from emlxd.errors import EmlxdError, RequestTimedOut, ServerFault
from emlxd.graph.batch import Begin, PrefillRow
from emlxd.worker.disk_cache import DiskCache
from emlxd.worker.flights import Flight, Flights, Landed
from emlxd.worker.mailbox import Mailbox
from emlxd.worker.meters import Meters
from emlxd.worker.pacer import PrefillPacer
from emlxd.worker.prefix_reuse import PrefixReuse
from emlxd.worker.runner import Runner
from emlxd.worker.scheduler import Chunk, Scheduler
from emlxd.worker.sequence import Sequence

log = structlog.get_logger(__name__)

UNLIMITED: Final = 1 << 30


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
        disk: DiskCache | None = None,
    ) -> None:
        """``max_draft`` is the length of the drafts that are checked, 0 is no speculation."""
        self._runner = runner
        self._scheduler = scheduler
        self._pacer = pacer
        self._mailbox = mailbox
        self._now = now
        self._max_draft = max_draft
        self._requests: dict[str, list[Sequence]] = {}
        self._flights = Flights(pacer, now)
        self._ended: list[Sequence] = []  # which may still have a slot
        self.prefixes = PrefixReuse(runner, disk, max_draft)
        self.meters = Meters()

    @property
    def idle(self) -> bool:
        return self._scheduler.idle and not self._flights and not self.prefixes.unspilled

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
        """Ends a request without an event for its reader. An unknown id is one that has ended already."""
        for sequence in self._requests.get(request_id, []).copy():
            self._end(sequence)
        self._free_slots()

    def step(self) -> None:
        """At most one slice of prefill and one decode step.

        Both are dispatched as soon as the last step but one is over, and before its tokens are looked at:
        while the host detokenizes, the device has a step to compute and another one to go on with.
        """
        self._end_late_requests()
        self._admit()
        if self._speculate():
            return
        if self._scheduler.prefilling:  # a prompt can take long to dispatch
            self._take(self._flights.landed())
        self._launch_prefill()
        self._launch_decode()
        self._take(self._flights.landed())
        self.prefixes.spill()
        self._flights.land()

    def _end_late_requests(self) -> None:
        """Fails requests that take too long."""
        now = self._now()
        late = [id for id, answers in self._requests.items() if answers[0].clock.deadline < now]
        for id in late:
            clock = self._requests[id][0].clock
            allowed = clock.deadline - clock.arrived
            self._fail([id], RequestTimedOut(f"The answer took longer than {allowed:g} seconds."))
        self._free_slots()

    def _speculate(self) -> bool:
        """Takes a step that checks drafts, if half of the answers have one. Gives whether it did.

        The step is read at once: how many tokens it gave says where the next one begins.
        """
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
        now = self._now()
        self._flights.passed(now)
        self.meters.step_batch_size.observe(len(drafts))
        for sequence, tokens in zip(running, found, strict=True):
            sequence.dispatched += len(tokens)
            self.prefixes.keep_step(sequence, sequence.written)
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
        self._take(self._flights.all())

    def fail_all(self, error: EmlxdError) -> None:
        """Ends every request with ``error``. The runner, which may be broken, is not asked for anything."""
        self._fail(list(self._requests), error)
        self._mailbox.flush()
        self._ended.clear()
        self._scheduler.clear()

    def recover(self, error: EmlxdError, *, shed: bool) -> None:
        """Starts anew after a step has failed: what was on the device is lost.

        All running requests fail with ``error``. With ``shed`` only the newest one does, to make room, and
        the others are computed again. Raises what the runner raises if it cannot go on.
        """
        with suppress(Exception):  # what was read before, unless that needs what is broken
            for landed in self._flights.landed():
                self._accept_tokens(landed)
        alive = [sequence for sequence in self._scheduler.running if not sequence.ended]
        running = sorted(alive, key=lambda sequence: sequence.order)
        failing = running[-1:] if shed else running
        self._flights.clear()
        self._runner.reset()
        self.prefixes.clear()
        self._fail([sequence.request.id for sequence in failing], error)
        for sequence in self._ended:
            self._scheduler.remove(sequence)  # nobody moves: the runner has forgotten all slots
        self._ended.clear()
        self._mailbox.flush()
        self._scheduler.requeue()

    def _admit(self) -> None:
        for sequence in self._scheduler.admit():
            sequence.clock.admitted = sequence.clock.admitted or self._now()
            if sequence.leader is None:
                self._reuse(sequence)
        for sequence in self._scheduler.running:
            if sequence.leader and not sequence.joined and not sequence.waits_for_leader:
                sequence.joined = True
                self._reuse_leader(sequence, sequence.leader)

    def _reuse(self, sequence: Sequence) -> None:
        """Copies what the prefix cache knows of the prompt, instead of computing it."""
        if not sequence.scores_prompt:
            self.prefixes.restore(sequence)
        if self._runner.recurrent and sequence.leader is None and sequence.request.n > 1:
            sequence.stops.add(sequence.shared_tokens)

    def _reuse_leader(self, sequence: Sequence, leader: Sequence) -> None:
        """Copies the prompt of another answer to it; its last token is computed, for what follows it."""
        if self._has_prompt(leader):
            self._runner.copy(leader.slot, sequence.slot, leader.shared_tokens)
            sequence.prefilled = leader.shared_tokens
        else:
            self._reuse(sequence)

    def _has_prompt(self, leader: Sequence) -> bool:
        """Whether a slot holds what the shared tokens of its prompt have left there.

        A recurrent state does if no token went past them, K/V in rings if not too many did.
        """
        shared = leader.shared_tokens
        if not leader.running or not shared:
            return False
        if self._runner.recurrent:
            return leader.prefilled == shared
        return leader.written + self._max_draft - 1 - shared <= self._runner.slack

    def _launch_prefill(self) -> None:
        chunks = self._scheduler.prefill(self._pacer.tokens if self._scheduler.decoding else UNLIMITED)
        begins = self._begins(chunks)
        chunks = [chunk for chunk in chunks if not chunk.sequence.ended]
        if not chunks:
            self._free_slots()
            return
        since = self._now()
        pending = self._runner.prefill([_prefill_row(chunk, begins.get(chunk.sequence)) for chunk in chunks])
        self._free_slots()  # of requests that have just failed: they never began to sample
        for chunk in chunks:
            self.prefixes.keep_prompt(chunk.sequence)
        complete = [chunk.sequence for chunk in chunks if chunk.last]
        rows = [sequence for sequence in complete if sequence.request.max_tokens]
        self._flights.launch(Flight(pending, rows, since, chunks))

    def _begins(self, chunks: Rows[Chunk]) -> dict[Sequence, Begin]:
        """How the sequences sample whose prompts end here. Where a grammar fails, its request does."""
        begins = {}
        for chunk in chunks:
            sequence = chunk.sequence
            if chunk.last and sequence.request.max_tokens and not sequence.ended:
                try:
                    begins[sequence] = sequence.begin()
                except Exception as error:
                    self._fail_one(sequence, error)
        return begins

    def _launch_decode(self) -> None:
        rows = self._scheduler.decode()
        if not rows:
            return
        since = self._now()
        positions = [row.position if row else None for row in rows]
        sequences = [row.sequence if row else None for row in rows]
        self.meters.step_batch_size.observe(len(rows) - sequences.count(None))
        if any(sequence and sequence.output.guarded for sequence in sequences):
            # Masks depend on the tokens before: these are read while the device is at the forward pass.
            self._runner.forward(positions)
            for landed in self._flights.all():
                self._accept_tokens(landed)
            pending = self._runner.sample([self._mask(sequence) for sequence in sequences])
        else:
            pending = self._runner.decode(positions)
        for row in rows:
            if row and not row.sequence.ended:
                self.prefixes.keep_step(row.sequence, row.position + 1)
        self._flights.launch(Flight(pending, sequences, since))

    def _mask(self, sequence: Sequence | None) -> bytes | None:
        if sequence is None or sequence.ended:
            return None
        try:
            return sequence.output.mask()
        except Exception as error:
            self._fail_one(sequence, error)
            return None

    def _take(self, steps: Iterable[Landed]) -> None:
        for landed in steps:
            self._accept_tokens(landed)
        self._free_slots()
        self._mailbox.flush()

    def _accept_tokens(self, landed: Landed) -> None:
        self._receive_prompts(landed)
        rows, output = landed.flight.rows, landed.output
        logprobs = output.logprobs or [None] * len(rows)
        for token, sequence, logprob in zip(output.tokens, rows, logprobs, strict=True):
            if sequence and not sequence.ended:
                self._accept(sequence, token, logprob, landed.at)

    def _receive_prompts(self, landed: Landed) -> None:
        """Delivers the prompts' log-probabilities, and ends requests that want no tokens."""
        for row, chunk in enumerate(landed.flight.chunks):
            sequence = chunk.sequence
            if sequence.ended:
                continue
            if sequence.scores_prompt:
                sequence.scores += landed.output.scores[row]
            if not chunk.last:
                continue
            if sequence.scores_prompt:
                self._mailbox.put(sequence.generation, sequence.scored())
            if not sequence.request.max_tokens:
                sequence.clock.first_token = landed.at
                self._mailbox.put(sequence.generation, sequence.finished("length", landed.at))
                self._end(sequence)

    def _accept(self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float) -> None:
        if not sequence.answer:
            sequence.clock.first_token = now
        else:
            self.meters.inter_token_seconds.observe(now - sequence.clock.last_token)
        sequence.clock.last_token = now
        try:
            pieces, reason = sequence.accept(token, logprob)
        except Exception as error:
            self._fail_one(sequence, error)
            return
        for piece in pieces:
            self._mailbox.put(sequence.generation, piece)
        if reason:
            self._mailbox.put(sequence.generation, sequence.finished(reason, now))
            try:
                self.prefixes.keep_answer(sequence)
            finally:  # it is over, also if there is no room to keep it
                self._end(sequence)
        else:
            self.prefixes.keep_along(sequence)

    def _fail(self, request_ids: Iterable[str], error: EmlxdError) -> None:
        for request_id in dict.fromkeys(request_ids):
            answers = self._requests[request_id].copy()
            self._mailbox.put(answers[0].generation, Failed(error))
            for sequence in answers:
                self._end(sequence)

    def _fail_one(self, sequence: Sequence, error: Exception) -> None:
        """Fails the request of an answer whose text cannot go on. Others know nothing of it."""
        if not isinstance(error, EmlxdError):
            log.exception("answer failed", request=sequence.request.id)
            error = ServerFault("The answer failed in a way that was not foreseen; see the log.")
        self._fail([sequence.request.id], error)

    def _end(self, sequence: Sequence) -> None:
        """Ends an answer. Tokens that a step in flight still brings for it are dropped on arrival."""
        sequence.ended = True
        self.prefixes.forget(sequence)
        self._ended.append(sequence)
        answers = self._requests[sequence.request.id]
        answers.remove(sequence)
        if not answers:
            del self._requests[sequence.request.id]

    def _free_slots(self) -> None:
        """Frees the slots of answers that have ended, and closes the gaps by moving others.

        Not to be called between a forward pass and its sampling, which must find the same rows.
        """
        for sequence in self._ended:
            slot = sequence.slot
            move = self._scheduler.remove(sequence)
            if move:
                self._runner.move(move.source, move.target, move.tokens)
            elif slot >= 0:
                self._runner.release(slot)
        self._ended.clear()


def _prefill_row(chunk: Chunk, begin: Begin | None) -> PrefillRow:
    sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.count
    return PrefillRow(
        slot=sequence.slot,
        start=start,
        tokens=sequence.context[start:end],
        begin=begin,
        targets=sequence.context[start + 1 : end + 1] if sequence.scores_prompt else (),
        adapter=sequence.adapter.number,
    )
