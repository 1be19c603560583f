"""What an operator may see and do while the daemon runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from emlxd.registry import ModelEntry, Registry
from emlxd.reload.reloader import Reloader


class Operator:
    """``memory_use`` gives what the device's library holds, in bytes. Nothing here tells a secret."""

    def __init__(
        self, registry: Registry, reloader: Reloader, memory_use: Callable[[], Mapping[str, int]]
    ) -> None:
        self._registry = registry
        self._reloader = reloader
        self._memory_use = memory_use
        self._now = time.monotonic

    def status(self) -> dict[str, Any]:
        self._registry.read_cards()  # in the background: what is not known yet is there the next time
        residents = self._registry.residents
        last = self._reloader.last
        return {
            "config": str(self._reloader.path.absolute()),
            "ready": self._registry.ready,
            "models": [self._model(entry) for entry in self._registry.models],
            "memory": {"budget": residents.budget, "counted": residents.used, **self._memory_use()},
            "last_reload": last
            and {"at": round(last.at, 3), "error": last.error, "plan": last.plan.as_dict()},
            "needs_restart": list(self._reloader.needs_restart),
        }

    def config(self) -> dict[str, Any]:
        """The settings in force, secrets as asterisks."""
        return self._reloader.settings.model_dump(mode="json")

    def _model(self, entry: ModelEntry) -> dict[str, Any]:
        status: dict[str, Any] = {
            "name": entry.name,
            "aliases": list(entry.aliases),
            "adapters": list(entry.adapters),
            "kind": entry.kind,
            "state": entry.state,
            "error": entry.error.message if entry.error else None,
            "load": entry.settings.load,
            "pinned": entry.settings.pinned,
            "priority": entry.settings.priority,
        }
        if resident := entry.usable:
            status |= {
                "requests": resident.leases,
                "idle_seconds": round(self._now() - resident.last_used, 1) if not resident.leases else 0.0,
                "memory": asdict(resident.needs) | {"total": resident.nbytes},
            }
            if stats := resident.worker.stats():
                status |= {"slots": stats.slots, "running": stats.running, "waiting": stats.waiting}
                status["tokens"] = sum(stats.counts.inter_token_seconds.counts)
        return status

    async def reload(self, *, dry_run: bool) -> dict[str, list[str]]:
        """What changed, or would. Raises EmlxdError with the reason if the configuration cannot be used."""
        found = self._reloader.preview() if dry_run else await self._reloader.reload()
        return found.as_dict()

    async def load(self, name: str) -> None:
        """Raises ModelNotFound, and Unavailable with the reason."""
        await self._registry.load_now(name)

    def unload(self, name: str) -> None:
        """Raises ModelNotFound. Requests that run finish first."""
        self._registry.unload(self._registry.find(name))
