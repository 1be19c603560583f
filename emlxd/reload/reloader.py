"""Reads config.yaml again and applies what changed, whole or not at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from emlxd.config import Settings
from emlxd.config_file import load
from emlxd.errors import EmlxdError, ServerFault
from emlxd.metrics import Metrics
from emlxd.registry import Registry
from emlxd.reload.change import Change
from emlxd.reload.plan import Plan, plan

log = structlog.get_logger(__name__)

Apply = Callable[[Settings], Callable[[], None]]
"""Checks settings outside of models, raising UserError, and gives what puts them in force."""

Budget = Callable[[Settings], int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The last reload. ``at`` in Unix seconds; ``error`` says why nothing was changed."""

    at: float
    plan: Plan
    error: str | None = None


class Reloader:
    """Knows the configuration in force. One reload at a time; lives on the event loop."""

    def __init__(
        self,
        path: Path,
        settings: Settings,
        registry: Registry,
        metrics: Metrics,
        *,
        apply: Apply,
        budget: Budget,
    ) -> None:
        self.path = path
        self.settings = settings
        self.last: Outcome | None = None
        self._started_with = settings
        self._registry = registry
        self._apply = apply
        self._budget = budget
        self._metrics = metrics
        self._lock = asyncio.Lock()

    @property
    def needs_restart(self) -> tuple[str, ...]:
        """Settings of the file in force that only a restart brings about."""
        return plan(self._started_with, self.settings).needs_restart

    @property
    def outdated(self) -> bool:
        """Whether the file says something else than what is in force, or cannot be read."""
        try:
            return not self._plan(load(self.path)).empty
        except EmlxdError:
            return True

    def preview(self) -> Plan:
        """What a reload would do. Raises UserError for a file that it would refuse."""
        new = load(self.path)
        self._apply(new)
        return self._plan(new)

    def _plan(self, new: Settings) -> Plan:
        """The way to ``new``. What goes back to how the daemon started needs no restart."""
        found, pending = plan(self.settings, new), plan(self._started_with, new).needs_restart
        return replace(found, needs_restart=tuple(name for name in found.needs_restart if name in pending))

    async def reload(self) -> Plan:
        """Raises EmlxdError with the reason if it failed; then the old configuration stays entirely."""
        # A client that gives up, or a daemon that stops, does not leave it half done.
        return await asyncio.shield(asyncio.create_task(self._reload()))

    async def _reload(self) -> Plan:
        async with self._lock:
            found = Plan()
            try:
                new = load(self.path)
                put_in_force = self._apply(new)
                found = self._plan(new)
                await self._change_models(found, new)
            except EmlxdError as error:
                raise self._failed(found, error) from None
            except Exception as error:
                log.exception("reload failed")
                reason = ServerFault("The reload failed in a way that was not foreseen; see the log.")
                raise self._failed(found, reason) from error
            self.settings = new
            try:
                put_in_force()
            except Exception as error:
                log.exception("the models are those of the new configuration, but not all settings are")
                raise ServerFault("Not all settings could be put in force; see the log.") from error
            self._succeeded(found)
            return found

    async def _change_models(self, found: Plan, new: Settings) -> None:
        residents = self._registry.residents
        before, after = residents.budget, self._budget(new)
        residents.budget = max(before, after)
        try:
            await Change(self._registry, found, new.models, after).run()
        except BaseException:
            residents.budget = before
            raise
        residents.budget = after
        residents.shrink()

    def _failed(self, found: Plan, error: EmlxdError) -> EmlxdError:
        self.last = Outcome(time.time(), found, error.message)
        self._metrics.reloaded("failed")
        log.error("reload failed: the old configuration stays", reason=error.message)
        return error

    def _succeeded(self, found: Plan) -> None:
        self.last = Outcome(time.time(), found)
        self._metrics.reloaded("unchanged" if found.empty else "changed")
        if found.empty:
            log.info("reload: nothing changed")
            return
        changes = {name: ", ".join(names) for name, names in found.as_dict().items() if names}
        log.info("reloaded", **changes)
        if found.needs_restart:
            log.warning("restart to put in force", settings=", ".join(found.needs_restart))

    async def try_reload(self) -> None:
        """A reload that nobody waits for: its failure is in the log, the status and the metrics."""
        try:
            await self.reload()
        except EmlxdError:
            return
