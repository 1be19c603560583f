"""Takes a registry from its models to those of another configuration, or leaves it as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from emlxd.config import ModelSettings
from emlxd.errors import NoRoom, UserError
from emlxd.memory import Needs, format_bytes
from emlxd.registry import ModelEntry, Registry
from emlxd.reload.plan import Plan
from emlxd.residency import Resident


class Change:
    """One change of models. New ones are loaded first, beside the old ones where memory allows.

    Where it does not, requests for the models that change wait; those that run finish; the old models leave,
    and the new ones come. Only when all new ones are there is anything final.
    """

    def __init__(self, registry: Registry, plan: Plan, models: Iterable[ModelSettings], budget: int) -> None:
        """``budget`` is the one to come, in bytes."""
        self._registry = registry
        self._budget = budget
        self._residents = registry.residents
        self._plan = plan
        self._models = {model.name: model for model in models}
        self._before = {entry.name: entry for entry in registry.models}
        self._staged: dict[str, Resident] = {}
        self._held: list[ModelEntry] = []
        self._in_memory = [entry for entry in registry.models if entry.usable]

    async def run(self) -> None:
        """Raises what loading a new model raises; then the registry is as before."""
        try:
            self._check_kept()
            for settings, needs in await self._load_beside():
                await self._hold_outgoing()
                await self._stage(settings, needs)
        except BaseException:
            self._undo()
            raise
        self._commit()

    def _check_kept(self) -> None:
        """Raises NoRoom for a model that stays and has no room in the budget to come."""
        for entry in self._in_memory:
            if entry.name in (*self._plan.keep, *self._plan.retune):
                self._check_budget(entry.settings, entry.nbytes)

    def _check_budget(self, settings: ModelSettings, nbytes: int) -> None:
        if nbytes > self._budget:
            raise NoRoom(
                f"The model '{settings.name}' needs {format_bytes(nbytes)} of memory; "
                f"the budget is {format_bytes(self._budget)}."
            )

    async def _load_beside(self) -> Sequence[tuple[ModelSettings, Needs]]:
        """Loads what has room beside the old models, and gives the rest."""
        rest = []
        for settings, needs in await self._prepare():
            try:
                if not self._residents.has_room(needs):
                    raise NoRoom("")
                await self._stage(settings, needs)
            except NoRoom:
                rest.append((settings, needs))
        return rest

    async def _prepare(self) -> Sequence[tuple[ModelSettings, Needs]]:
        """All files are on this machine before anything is loaded, which may take minutes."""
        prepared = []
        for settings in self._incoming():
            with _naming(settings):
                needs = await self._residents.prepare(settings)
            self._check_budget(settings, needs.total)
            prepared.append((settings, needs))
        return prepared

    def _incoming(self) -> list[ModelSettings]:
        """The new and replaced models that have to be in memory, the most important first."""
        names = [name for name in (*self._plan.add, *self._plan.replace) if self._belongs_in_memory(name)]
        return sorted((self._models[name] for name in names), key=lambda model: -model.priority)

    def _belongs_in_memory(self, name: str) -> bool:
        old = self._before.get(name)
        in_use = old is not None and (old.usable or old.loading)
        return self._models[name].load == "startup" or bool(in_use)

    async def _stage(self, settings: ModelSettings, needs: Needs) -> None:
        with _naming(settings):
            resident = await self._residents.load(settings, needs)
        resident.leases += 1  # nobody may unload it before it has its place
        self._staged[settings.name] = resident

    async def _hold_outgoing(self) -> None:
        """From now on requests for the models that are to go wait for the outcome, and those leave.

        Also those that a new one is there for already: their room is needed.
        """
        for name in (*self._plan.drop, *self._plan.replace):
            entry = self._before[name]
            if entry.held is None:
                entry.held = asyncio.Event()
                self._held.append(entry)
        for entry in self._held:
            if entry.loading is not None:
                await asyncio.shield(entry.loading)
            self._registry.discard(entry)

    def _undo(self) -> None:
        for resident in self._staged.values():
            resident.leases -= 1
            self._residents.retire(resident)
        for entry in self._in_memory:
            if not entry.usable:  # it had to leave, and comes back
                self._registry.discard(entry)
                entry.wanted = True
        self._release()

    def _release(self) -> None:
        for entry in self._held:
            if entry.held is not None:
                entry.held.set()
                entry.held = None

    def _commit(self) -> None:
        entries = [self._entry(model) for model in self._models.values()]
        for entry in self._before.values():
            if entry not in entries:
                entry.dropped = True
                self._registry.discard(entry)
        self._registry.set_entries(entries)
        self._release()

    def _entry(self, model: ModelSettings) -> ModelEntry:
        old = self._before.get(model.name)
        if old is not None and model.name not in self._plan.replace:
            if model.name in self._plan.retune:
                self._registry.retune(old, model)
            return old
        entry = ModelEntry(model, wanted=model.load == "startup")
        if old is not None:
            entry.created = old.created
        if resident := self._staged.get(model.name):
            resident.leases -= 1
            entry.resident = resident
        return entry


@contextmanager
def _naming(model: ModelSettings) -> Iterator[None]:
    """What is wrong with files is told with the model that they are for."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{model.name}: {error.message}") from error
