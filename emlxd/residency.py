"""Which models are in memory: room is made before one is loaded, and none leaves while it is used."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import structlog

from emlxd.config import ModelSettings
from emlxd.core import WorkerCounts
from emlxd.errors import NoRoom
from emlxd.memory import Needs, format_bytes, victims
from emlxd.worker.make import AnyWorker

log = structlog.get_logger(__name__)

UnloadReason = Literal["request", "idle", "room", "replaced", "died"]
MakeWorker = Callable[[ModelSettings], AnyWorker]
Prepare = Callable[[ModelSettings], Awaitable[Needs]]
"""Brings the model's files to this machine and says what it will take. Raises EmlxdError."""


@dataclass(eq=False, slots=True)
class Resident:
    """A model in memory, or on its way in or out.

    ``needs`` are the bytes it is counted with, ``load_seconds`` is how long loading it took. ``leases``
    counts who uses it. When it is ``retired`` it takes no more requests; after the last lease it is
    ``closing``, and ``gone`` is set at the end.
    """

    settings: ModelSettings
    worker: AnyWorker
    needs: Needs
    last_used: float
    leases: int = 0
    loaded: bool = False
    load_seconds: float = 0.0
    retired: bool = False
    closing: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def nbytes(self) -> int:
        return self.needs.total

    @property
    def priority(self) -> int:
        return self.settings.priority

    @property
    def usable(self) -> bool:
        """Whether it takes requests."""
        return self.loaded and not self.retired and self.worker.alive

    @property
    def dead(self) -> bool:
        """Whether its thread ended though nobody told it to."""
        return self.loaded and not self.retired and not self.worker.alive

    @property
    def idle(self) -> bool:
        """Whether it could be unloaded: nobody uses it and nothing holds it."""
        return self.usable and not self.leases and not self.settings.pinned

    def __str__(self) -> str:
        """How it is told to people: ``smol 1.2 GiB (in use)``."""
        what = "pinned" if self.settings.pinned else "idle"
        if self.leases:
            what = "in use"
        elif not self.loaded:
            what = "loading"
        return f"{self.settings.name} {format_bytes(self.nbytes)} ({what})"


class Residents:
    """Everything in memory, within ``budget`` bytes. ``now`` is a monotonic clock in seconds.

    For metrics, ``loads`` are counted by model and result, ``unloads`` by model and reason, and
    ``counts_of_gone`` holds what the workers have done that have left, by model.
    """

    def __init__(
        self,
        budget: int,
        make_worker: MakeWorker,
        prepare: Prepare,
        now: Callable[[], float] = time.monotonic,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """``changed`` is called when a model has come or gone."""
        self.budget = budget
        self._prepare = prepare
        self._make_worker = make_worker
        self._now = now
        self._changed = changed
        self._residents: list[Resident] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._freed = asyncio.Event()
        self.loads: Counter[tuple[str, ...]] = Counter()
        self.unloads: Counter[tuple[str, ...]] = Counter()
        self.counts_of_gone: dict[str, WorkerCounts] = {}

    def __iter__(self) -> Iterator[Resident]:
        return iter(self._residents)

    @property
    def used(self) -> int:
        """Bytes counted for all that is in memory."""
        return sum(resident.nbytes for resident in self._residents)

    @property
    def activations(self) -> int:
        """Bytes of them that are for what steps compute."""
        return sum(resident.needs.activations for resident in self._residents)

    @property
    def in_use(self) -> bool:
        """Whether a request holds a model."""
        return any(resident.leases for resident in self._residents)

    def has_room(self, needs: Needs) -> bool:
        """Whether it fits now, without anybody leaving."""
        return self.used + needs.total <= self.budget

    async def prepare(self, settings: ModelSettings) -> Needs:
        """Brings the model's files to this machine and says what it will take. Raises EmlxdError."""
        try:
            return await self._prepare(settings)
        except Exception:
            self.loads[settings.name, "failure"] += 1
            raise

    async def load(self, settings: ModelSettings, needs: Needs) -> Resident:
        """Loads a model once there is room for it. Raises NoRoom, or what loading raises."""
        resident = await self._admit(settings, needs)
        log.info("loading model", model=settings.name, memory=format_bytes(needs.total))
        started = self._now()
        try:
            await resident.worker.start()
        except BaseException:
            self.loads[settings.name, "failure"] += 1
            self.retire(resident)
            raise
        self.loads[settings.name, "success"] += 1
        resident.loaded, resident.last_used = True, self._now()
        resident.load_seconds = resident.last_used - started
        log.info("model loaded", model=settings.name, seconds=round(resident.load_seconds, 2))
        return resident

    async def _admit(self, settings: ModelSettings, needs: Needs) -> Resident:
        """Counts the model in, after whoever must leave for it is gone."""
        while (shortage := self.used + needs.total - self.budget) > 0:
            leaving = sum(resident.nbytes for resident in self._residents if resident.retired)
            idle = [r for r in self._residents if r.idle and r.priority <= settings.priority]
            chosen = victims(idle, shortage - leaving)
            if chosen is None:
                raise self._no_room(settings, needs)
            for resident in chosen:
                log.info("model unloaded", model=resident.settings.name, to_make_room_for=settings.name)
                self.retire(resident, "room")
            self._freed.clear()
            await self._freed.wait()
        resident = Resident(settings, self._make_worker(settings), needs, self._now())
        self._residents.append(resident)
        self._changed()
        return resident

    def _no_room(self, settings: ModelSettings, needs: Needs) -> NoRoom:
        held = ", ".join(map(str, self._residents)) or "nothing"
        return NoRoom(
            f"The model '{settings.name}' needs {format_bytes(needs.total)} of memory; "
            f"the budget is {format_bytes(self.budget)}, and in memory is {held}.",
            retry_after=5,
        )

    @contextmanager
    def lease(self, resident: Resident) -> Iterator[AnyWorker]:
        """Its worker, which stays as long as the lease is held."""
        resident.leases += 1
        try:
            yield resident.worker
        finally:
            resident.leases -= 1
            resident.last_used = self._now()
            self._let_go(resident)

    def shrink(self) -> None:
        """Unloads idle models until a smaller budget holds, as far as that goes."""
        for resident in sorted(self._residents, key=lambda r: (r.priority, r.last_used)):
            staying = sum(r.nbytes for r in self._residents if not r.retired)
            if resident.idle and staying > self.budget:
                self.retire(resident, "room")

    def retire(self, resident: Resident, reason: UnloadReason = "replaced") -> None:
        """No more requests for it; it is unloaded as soon as the last one has ended."""
        if not resident.retired:
            resident.retired = True
            if resident.loaded:
                self.unloads[resident.settings.name, reason] += 1
            self._let_go(resident)

    def _let_go(self, resident: Resident) -> None:
        if resident.retired and not resident.leases and not resident.closing:
            resident.closing = True
            task = asyncio.create_task(self._close(resident))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close(self, resident: Resident) -> None:
        try:
            await resident.worker.close()
        except Exception:
            log.exception("a worker did not end in order", model=resident.settings.name)
        self._residents.remove(resident)
        self._changed()
        self._keep_counts(resident)
        resident.gone.set()
        self._freed.set()

    def _keep_counts(self, resident: Resident) -> None:
        stats, name = resident.worker.stats(), resident.settings.name
        if stats is not None:
            before = self.counts_of_gone.get(name)
            self.counts_of_gone[name] = before + stats.counts if before else stats.counts

    async def close(self, limit: float) -> bool:
        """Unloads everything, whoever uses it. False if something is stuck after ``limit`` seconds."""
        for resident in self._residents:
            resident.leases, resident.retired = 0, True
            self._let_go(resident)
        if self._closing:
            await asyncio.wait(self._closing, timeout=limit)
        return not self._residents
