"""The models of config.yaml by name and alias: when each is loaded and unloaded, and who may use it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

import structlog

from emlxd.config import ModelSettings
from emlxd.core import Kind, ModelCard
from emlxd.errors import EmlxdError, ModelNotFound, NoRoom, ServerFault, Unavailable, UserError
from emlxd.residency import Resident, Residents, UnloadReason
from emlxd.worker.adapted import Served, adapted

log = structlog.get_logger(__name__)

Describe = Callable[[Sequence[ModelSettings]], Awaitable[Mapping[str, ModelCard]]]
"""Reads what the models' files say, of those that are on this machine, by name."""

State = Literal["unloaded", "loading", "loaded", "failed"]

FIRST_RETRY: Final = 1.0  # seconds after the first failed load; doubles with each
LAST_RETRY: Final = 60.0
MOST_DOUBLINGS: Final = 10  # more than lead to the last: a float has no room for a thousand
CLOSE_LIMIT: Final = 10.0  # seconds for workers to end a step, or a load
TICK: Final = 1.0  # seconds between looks at idle times, failures and stuck workers


@dataclass(eq=False, slots=True)
class ModelEntry:
    """A model of the configuration. ``created`` is in Unix seconds, ``retry_at`` of the registry's clock.

    ``wanted``: it should be in memory without being asked for. ``dropped``: a reload has removed it. ``held``
    is set while a reload decides what becomes of the model; requests wait for it. ``waiters`` wait for a
    load, and ``hold`` keeps what was loaded until they have it: two models without room for both would chase
    each other for ever.
    """

    settings: ModelSettings
    created: int = field(default_factory=lambda: int(time.time()))
    card: ModelCard | None = None
    resident: Resident | None = None
    loading: asyncio.Task[EmlxdError | None] | None = None
    error: EmlxdError | None = None
    failures: int = 0
    retry_at: float = 0.0
    wanted: bool = False
    dropped: bool = False
    held: asyncio.Event | None = None
    waiters: int = 0
    hold: ExitStack = field(default_factory=ExitStack)

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def aliases(self) -> Sequence[str]:
        return self.settings.aliases

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the model with one of its adapters each."""
        return self.settings.adapter_names

    @property
    def kind(self) -> Kind | None:
        """What it is for, None if only its files would tell and they are not here."""
        if self.settings.kind != "auto":
            return self.settings.kind
        return self.card.kind if self.card else None

    @property
    def nbytes(self) -> int:
        """What it takes of memory now."""
        return self.usable.nbytes if self.usable else 0

    def seconds_left(self, now: float) -> float:
        """Until it may be unloaded for idleness, by the registry's clock; infinite if it never is."""
        resident, limit = self.usable, self.settings.idle_unload
        if resident is None or not limit or resident.settings.pinned:
            return math.inf
        return limit if resident.leases else max(resident.last_used + limit - now, 0.0)

    @property
    def state(self) -> State:
        if self.usable is not None:
            return "loaded"
        if self.loading is not None:
            return "loading"
        return "failed" if self.error is not None or self.dead else "unloaded"

    @property
    def dead(self) -> bool:
        return self.resident is not None and self.resident.dead

    @property
    def evicted(self) -> bool:
        """Whether it was unloaded to make room."""
        return self.resident is not None and self.resident.retired

    @property
    def usable(self) -> Resident | None:
        """What serves its requests now."""
        return self.resident if self.resident is not None and self.resident.usable else None


class Registry:
    """Only what is in the configuration is served. Lives on the event loop.

    ``stall_timeout`` in seconds: a worker that works on one step for longer is stuck; 0 is never.
    """

    def __init__(
        self,
        models: Iterable[ModelSettings],
        residents: Residents,
        *,
        describe: Describe | None = None,
        stall_timeout: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.residents = residents
        self.stall_timeout = stall_timeout
        self._describe = describe
        self._reading: asyncio.Task[None] | None = None
        self._now = now
        self._entries: dict[str, ModelEntry] = {}
        self._names: dict[str, ModelEntry] = {}
        self._closed = False
        self._to_start: list[ModelEntry] = []  # startup models that ``load`` has not come to
        self.set_entries(ModelEntry(model, wanted=model.load == "startup") for model in models)

    @property
    def models(self) -> Sequence[ModelEntry]:
        return list(self._entries.values())

    def set_entries(self, entries: Iterable[ModelEntry]) -> None:
        """Serve these and no others from now on."""
        self._entries = {entry.name: entry for entry in entries}
        self._names = {name: e for e in self._entries.values() for name in (e.name, *e.aliases, *e.adapters)}

    def find(self, name: str) -> ModelEntry:
        """The model with this name or alias, or with an adapter of this name. Raises ModelNotFound."""
        if name not in self._names:
            raise ModelNotFound(name)
        return self._names[name]

    async def cards(self) -> Mapping[str, ModelCard]:
        """What the models' files say of them, by name, of those whose files are on this machine."""
        await asyncio.shield(self.read_cards())
        return {entry.name: entry.card for entry in self._entries.values() if entry.card}

    def read_cards(self) -> asyncio.Task[None]:
        """Reads the cards that are not known yet, once for all who wait."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_cards())
        return self._reading

    async def _read_cards(self) -> None:
        unread = [entry for entry in self._entries.values() if entry.card is None]
        if unread and self._describe:
            cards = await self._describe([entry.settings for entry in unread])
            for entry in unread:
                entry.card = cards.get(entry.name)

    @property
    def ready(self) -> bool:
        """Whether every model answers that should be in memory, and no worker is dead or stuck."""
        entries = self._entries.values()
        needed = [e for e in entries if e.wanted and e.settings.required and not e.evicted]
        return all(e.usable for e in needed) and not any(e.dead for e in entries) and not self.stuck

    @property
    def stuck(self) -> Sequence[str]:
        """Models whose worker works on one step for too long."""
        limit = self.stall_timeout or math.inf
        return [r.settings.name for r in self.residents if r.loaded and r.worker.heartbeat_age > limit]

    async def load(self) -> None:
        """Loads the startup models, the most important first. Raises UserError if a required one fails."""
        wanted = [entry for entry in self._entries.values() if entry.wanted]
        self._to_start = sorted(wanted, key=lambda entry: -entry.settings.priority)
        while self._to_start:
            entry = self._to_start.pop(0)
            if entry.held:
                await entry.held.wait()
            if entry.dropped or entry.usable:  # by a reload, or for a request, meanwhile
                continue
            error = await asyncio.shield(self._start_loading(entry))
            if isinstance(error, NoRoom) and self.residents.in_use:
                continue  # its room is taken by a model that somebody has asked for: ``tick`` tries again
            if error is not None and entry.settings.required and not entry.dropped:
                raise error if isinstance(error, UserError) else UserError(error.message)

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[Served]:
        """A worker that stays while the lease is held; the model is loaded if need be.

        Raises ModelNotFound, and Unavailable with the reason if it cannot be loaded now.
        """
        resident = await self._resident(name)
        with self.residents.lease(resident) as worker:
            yield adapted(worker, name)

    async def _resident(self, name: str) -> Resident:
        entry = self.find(name)
        try:
            async with asyncio.timeout(entry.settings.load_timeout):
                while (resident := entry.usable) is None or entry.held:
                    await self._progress(entry)
                    entry = self.find(name)  # a reload may have put another one in its place
                return resident
        except TimeoutError:
            raise Unavailable(f"The model '{entry.name}' is still loading.", retry_after=5) from None

    async def _progress(self, entry: ModelEntry) -> None:
        """Waits for the next change of a model that cannot be used. Raises what its loading failed with."""
        if entry.held is not None:
            await entry.held.wait()
            return
        if entry.dead:
            self._died(entry)
        backs_off = entry.loading is None and self._now() < entry.retry_at
        if backs_off and entry.error and not isinstance(entry.error, NoRoom):
            raise self._refusal(entry, entry.error)
        entry.waiters += 1
        try:
            # The load belongs to all who wait for it, and to nobody.
            error = await asyncio.shield(self._start_loading(entry))
        finally:
            entry.waiters -= 1
            if not entry.waiters:
                entry.hold.close()
        if error is not None and not entry.dropped:
            raise self._refusal(entry, error)

    def _refusal(self, entry: ModelEntry, error: EmlxdError) -> Unavailable:
        if isinstance(error, NoRoom):
            return NoRoom(error.message, retry_after=error.retry_after)
        wait = max(1, math.ceil(entry.retry_at - self._now()))
        return Unavailable(f"The model '{entry.name}' could not be loaded: {error.message}", retry_after=wait)

    def _start_loading(self, entry: ModelEntry) -> asyncio.Task[EmlxdError | None]:
        if self._closed:
            raise Unavailable("The server is shutting down.")
        if entry.loading is None:
            entry.loading = asyncio.create_task(self._load(entry))
        return entry.loading

    async def _load(self, entry: ModelEntry) -> EmlxdError | None:
        """One load for all who wait. The failure is given, not raised: there may be nobody to take it."""
        self.discard(entry)
        entry.card = None  # its files may be others now
        try:
            needs = await self.residents.prepare(entry.settings)
            entry.resident = await self.residents.load(entry.settings, needs)
        except EmlxdError as error:
            self._failed(entry, error)
        except Exception:
            log.exception("load failed", model=entry.name)
            self._failed(entry, ServerFault("Loading it failed in a way that was not foreseen; see the log."))
        else:
            entry.error, entry.failures = None, 0
            if entry.waiters:
                entry.hold.enter_context(self.residents.lease(entry.resident))
            if entry.resident.settings is not entry.settings:
                self.retune(entry, entry.settings)
        finally:
            entry.loading = None
        if entry.resident is not None and (entry.dropped or self._closed):
            self.residents.retire(entry.resident)
        return entry.error

    def _failed(self, entry: ModelEntry, error: EmlxdError) -> None:
        # A traceback would keep what the failed load had on the device.
        entry.error = error.with_traceback(None)
        entry.error.__context__ = entry.error.__cause__ = None
        entry.failures += 1
        doublings = min(entry.failures - 1, MOST_DOUBLINGS)
        entry.retry_at = self._now() + min(FIRST_RETRY * 2**doublings, LAST_RETRY)
        log.warning("model not loaded", model=entry.name, reason=error.message, failures=entry.failures)

    def _died(self, entry: ModelEntry) -> None:
        log.error("worker died", model=entry.name)
        self.discard(entry, "died")
        self._failed(entry, ServerFault("Its worker ended unexpectedly; see the log."))
        entry.wanted = True

    def discard(self, entry: ModelEntry, reason: UnloadReason = "replaced") -> None:
        """What the model has in memory takes no more requests, and leaves when the last one has ended."""
        if entry.resident is not None:
            self.residents.retire(entry.resident, reason)
            entry.resident = None

    def unload(self, entry: ModelEntry, reason: UnloadReason = "request") -> None:
        """Takes the model out of memory once nobody uses it. The next request loads it again.

        Raises Unavailable while it is loading.
        """
        if entry.loading is not None:
            raise Unavailable(f"The model '{entry.name}' is loading; unload it when it is loaded.")
        if entry.resident is not None:
            log.info("model unloaded", model=entry.name, reason=reason)
            self.discard(entry, reason)
        entry.wanted, entry.error = False, None

    def retune(self, entry: ModelEntry, settings: ModelSettings) -> None:
        """Changes what may change while the model is in memory."""
        if entry.settings.load != settings.load:
            entry.wanted = settings.load == "startup"
        entry.settings = settings
        if entry.resident is not None:
            entry.resident.settings = settings
            entry.resident.worker.retune(settings)

    async def load_now(self, name: str) -> None:
        """Loads the model if it is not in memory. Raises ModelNotFound, and what its loading failed with."""
        self.find(name).retry_at = 0.0
        while (entry := self.find(name)).usable is None:  # a reload may have put another one in its place
            await self._progress(entry)

    def tick(self) -> None:
        """To be called every second.

        Idle models leave, evicted ones are forgotten, wanted ones that died or failed are loaded again.
        """
        for entry in self._entries.values():
            if entry.dead:
                self._died(entry)
            elif entry.evicted:
                entry.resident, entry.wanted = None, False
            elif self._idle_for_long(entry):
                self.unload(entry, "idle")
            if self._is_due(entry):
                self._start_loading(entry)

    def _is_due(self, entry: ModelEntry) -> bool:
        """Whether a model that should be in memory is to be loaded now."""
        waits = entry.usable or entry.held or entry in self._to_start
        return entry.wanted and not waits and self._now() >= entry.retry_at

    def _idle_for_long(self, entry: ModelEntry) -> bool:
        return entry.seconds_left(self._now()) == 0.0

    async def watch(self) -> None:
        """Ticks for ever. Raises ServerFault when a worker is stuck, which only a new process can mend."""
        while True:
            await asyncio.sleep(TICK)
            self.tick()
            if stuck := self.stuck:
                names = ", ".join(stuck)
                raise ServerFault(f"The worker of {names} has worked on one step for too long.")

    async def close(self, limit: float = CLOSE_LIMIT) -> bool:
        """Ends every worker and frees its model. False if one is stuck after ``limit`` seconds."""
        self._closed = True
        return await self.residents.close(limit)
