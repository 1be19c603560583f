"""The composition root: models, workers, HTTP, reloading, and the process around them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import structlog

from emlxd import log
from emlxd.config import ModelSettings, Settings
from emlxd.core import ModelCard
from emlxd.downloads.cache import Progress
from emlxd.errors import ServerFault
from emlxd.memory import Needs
from emlxd.metrics import Metrics
from emlxd.operate import Operator
from emlxd.readings import Readings
from emlxd.registry import Registry
from emlxd.reload.reloader import Reloader
from emlxd.reload.watch import changes, fingerprint
from emlxd.residency import Residents
from emlxd.server import Front, bind, serve
from emlxd.sources import fetch_model
from emlxd.threads import run_in_thread
from emlxd.tracing import open_tracer
from emlxd.worker.gate import Gate
from emlxd.worker.make import AnyWorker, make_worker

REPORTED_EVERY: Final = 0.1  # seconds, while models load
STUCK: Final = 70  # exit status, EX_SOFTWARE of sysexits.h: start me again

_log = structlog.get_logger("emlxd.daemon")


ProgressDisplay = Callable[[], AbstractContextManager[Progress]]
"""Opens something that shows progress as long as it is open, and gives what reports to it."""


def run(settings: Settings, path: Path, display: ProgressDisplay | None = None) -> None:
    """Serve what ``settings`` say until told to stop; the file at ``path`` is where they came from.

    ``display`` shows how far loading the startup models is.

    Raises UserError for what the user can mend. Where a worker is stuck the process ends with status 70.
    """
    listener = bind(settings.server)
    try:
        clean = asyncio.run(_run(settings, path, listener, display))
    except ServerFault as fault:
        _log.critical("giving up", reason=fault.message)
        _end_now(STUCK)
    if not clean:
        _end_now(0)


def _end_now(status: int) -> None:
    """Ends the process without the interpreter's ceremony, which fails beside a thread that is inside MLX."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


async def _run(
    settings: Settings, path: Path, listener: socket.socket, display: ProgressDisplay | None
) -> bool:
    """Serves until told to stop. Gives whether every worker has ended."""
    from emlxd import footprint
    from emlxd.graph import BLAS, device

    if BLAS.hint:
        _log.warning(BLAS.hint)
    memory = settings.memory
    footprint.apply_limits(memory)
    metrics = Metrics(device=device.current_device().kind)
    registry = _make_registry(
        settings, changed=lambda: footprint.apply_limits(memory, registry.residents.activations)
    )
    metrics.add_collector(Readings(registry, footprint.memory_use))
    tracer = open_tracer(settings.tracing.endpoint) if settings.tracing.endpoint else None
    front = Front(registry, metrics, tracer=tracer)

    def apply(new: Settings) -> Callable[[], None]:
        swap = front.prepare(new)

        def put_in_force() -> None:
            nonlocal memory
            swap()
            log.configure(new.log)
            memory = new.memory
            footprint.apply_limits(memory, registry.residents.activations)
            registry.stall_timeout = new.server.stall_timeout

        return put_in_force

    reloader = Reloader(
        path, settings, registry, metrics, apply=apply, budget=lambda new: footprint.budget(new.memory)
    )
    front.operator = Operator(registry, reloader, footprint.memory_use)
    tasks = (
        lambda: load_with_progress(registry, footprint.memory_use, display) if display else registry.load(),
        registry.watch,
        lambda: _reload_on_change(reloader),
        lambda: _reload_on_hangup(reloader),
    )
    print(f"emlxd follows {path.absolute()}", flush=True)
    try:
        await serve(settings, front, listener, tasks=tasks)
    finally:
        clean = await registry.close()
        if tracer is not None:
            tracer.close()
    return clean


async def load_with_progress(
    registry: Registry, memory_use: Callable[[], Mapping[str, int]], display: ProgressDisplay
) -> None:
    """Loads the startup models, and shows how many of the bytes that each keeps are on the device."""
    with display() as report:
        reporter = asyncio.create_task(_report_loading(registry, memory_use, report))
        try:
            await registry.load()
        finally:
            reporter.cancel()


async def _report_loading(
    registry: Registry, memory_use: Callable[[], Mapping[str, int]], report: Progress
) -> None:
    current, before = None, 0
    while True:
        loading = next((resident for resident in registry.residents if not resident.loaded), None)
        if loading is not current:
            current, before = loading, memory_use()["active"]
        if loading is not None:
            kept = loading.needs.total - loading.needs.activations
            report(f"loading {loading.settings.name}", max(memory_use()["active"] - before, 0), kept)
        await asyncio.sleep(REPORTED_EVERY)


def _make_registry(settings: Settings, changed: Callable[[], None]) -> Registry:
    from emlxd import description, footprint

    gate = Gate()

    def worker_for(model: ModelSettings) -> AnyWorker:
        return make_worker(*fetch_model(model), gate)  # it was prepared, so its files are here

    async def prepare(model: ModelSettings) -> Needs:
        return await run_in_thread(lambda: footprint.predict(*fetch_model(model)))

    async def describe(models: Sequence[ModelSettings]) -> Mapping[str, ModelCard]:
        return await run_in_thread(lambda: description.describe_all(models))

    residents = Residents(footprint.budget(settings.memory), worker_for, prepare, changed=changed)
    return Registry(
        settings.models, residents, describe=describe, stall_timeout=settings.server.stall_timeout
    )


async def _reload_on_change(reloader: Reloader) -> None:
    seen = fingerprint(reloader.path)
    if reloader.outdated:  # it was edited while the daemon started
        await reloader.try_reload()
    async for _ in changes(reloader.path, seen):
        await reloader.try_reload()


async def _reload_on_hangup(reloader: Reloader) -> None:
    loop, hangup = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    try:
        while await hangup.wait():
            hangup.clear()
            await reloader.try_reload()
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
