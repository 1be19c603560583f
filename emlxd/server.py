"""The composition root: a bound port, the app on Hypercorn, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

import structlog
from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config
from quart import Quart

from emlxd.api import surface
from emlxd.api.app import create_app
from emlxd.api.drain import Drain
from emlxd.config import ModelSettings, ServerSettings, Settings
from emlxd.errors import ServerFault, UserError
from emlxd.memory import Needs
from emlxd.metrics import Metrics
from emlxd.registry import Registry
from emlxd.residency import Residents
from emlxd.sources import fetch
from emlxd.worker.gate import Gate
from emlxd.worker.load import load_model
from emlxd.worker.worker import Worker, WorkerOptions

BACKLOG = 2048  # a burst of clients waits to be accepted instead of being dropped at 100
CUT_GRACE = 2.0  # seconds for the clients of cut streams to read the error event
_log = structlog.get_logger("emlxd.server")

STUCK = 70  # exit status, EX_SOFTWARE of sysexits.h: start me again

T = TypeVar("T")
Task = Callable[[], Awaitable[object]]


def run(settings: Settings) -> None:
    """Serve what ``settings`` say until told to stop.

    Raises UserError for what the user can mend. A stuck worker ends the process with status 70.
    """
    listener = bind(settings.server)
    status = 0
    try:
        asyncio.run(_run(settings, listener))
    except ServerFault as fault:
        _log.critical("giving up", reason=fault.message)
        status = STUCK
    left = [thread for thread in threading.enumerate() if thread.name.startswith("worker-")]
    if status or left:
        # The interpreter cannot end beside a thread that is inside MLX.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


async def _run(settings: Settings, listener: socket.socket) -> None:
    from emlxd import footprint
    from emlxd.graph import BLAS, device

    if BLAS.hint:
        _log.warning(BLAS.hint)
    footprint.apply_limits(settings.memory)
    gate = Gate()

    async def prepare(model: ModelSettings) -> Needs:
        return await _in_thread(lambda: footprint.predict(model, fetch(model.source)))

    residents = Residents(footprint.budget(settings.memory), lambda model: _make_worker(model, gate), prepare)
    registry = Registry(settings.models, residents, stall_timeout=settings.server.stall_timeout)
    metrics = Metrics(device=device.current_device().kind)
    try:
        await serve(settings, registry, metrics, listener, tasks=(registry.load, registry.watch))
    finally:
        await registry.close()


def _make_worker(model: ModelSettings, gate: Gate) -> Worker:
    options = WorkerOptions(
        name=model.name,
        max_queue=model.max_queue,
        prefill_chunk=model.prefill_chunk,
        prefill_slice=model.prefill_slice,
        max_draft=model.speculative.prompt_lookup.max_draft if model.speculative.prompt_lookup else 0,
    )
    return Worker(options, lambda: load_model(model, fetch(model.source)), gate)


async def _in_thread(work: Callable[[], T]) -> T:
    """What ``work`` gives, from a thread that does not keep the process from ending: it may download."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="prepare", daemon=True).start()
    return await asyncio.shield(asyncio.wrap_future(done))


def bind(settings: ServerSettings) -> socket.socket:
    """The listening address, taken before any model is loaded. Raises UserError when it cannot be.

    Clients are refused until ``serve`` listens on it.
    """
    where = f"{settings.host}:{settings.port}"
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
    except OSError as error:
        raise UserError(f"Cannot serve on {where}: {error.strerror or error}.") from None
    try:
        # Without this a restart waits for the old server's connections to leave TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"Port {settings.port} on {settings.host} is in use. "
                "Stop what listens there, or set server.port (EMLXD_SERVER__PORT) to another one."
            ) from None
        raise UserError(f"Cannot serve on {where}: {error.strerror or error}.") from None
    return listener


async def serve(
    settings: Settings,
    registry: surface.Registry,
    metrics: Metrics,
    listener: socket.socket,
    *,
    tasks: Sequence[Task] = (),
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until a signal or ``stop``, then finish what runs, at most ``server.drain_timeout`` seconds.

    ``tasks`` run beside it, from the moment that it answers /health and /ready: loading models, watching
    workers. What one of them raises ends the server and is raised here.
    """
    drain = Drain()
    stop = stop or asyncio.Event()
    app = create_app(registry, settings, metrics, drain)
    with _stop_on_signals(stop):
        listener.listen(BACKLOG)  # before it is announced: who reads the line may connect
        announce(settings.server, registry, listener)
        config = hypercorn_config(settings.server, listener)
        serving = asyncio.create_task(_listen(app, config, stop))
        beside = [asyncio.create_task(_beside(task, stop)) for task in tasks]
        try:
            await stop.wait()
            drain.start()
            await _wind_down(serving, drain, settings.server.drain_timeout)
        finally:
            for task in beside:
                task.cancel()
            ends = await asyncio.gather(*beside, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end


def announce(settings: ServerSettings, registry: surface.Registry, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    models = ", ".join(entry.name for entry in registry.models) or "no models"
    print(f"emlxd serves {models} at http://{_url_host(settings.host)}:{port}/v1", flush=True)


def hypercorn_config(settings: ServerSettings, listener: socket.socket) -> Config:
    """Each of Hypercorn's defaults that matters here, and why it is kept or not.

    ``listener`` is Hypercorn's from now on: a second handle would keep the port open in the drain.
    """
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.backlog = BACKLOG
    config.alpn_protocols = ["http/1.1"]  # no TLS here; HTTP/2 only by prior knowledge
    config.keep_alive_timeout = 75.0  # above the 5 to 60 s of client pools, so that they close first
    config.keep_alive_max_requests = sys.maxsize  # one process: nothing is gained by reconnecting
    config.h11_max_incomplete_size = 64 * 1024  # headers; browsers send every localhost cookie to any port
    config.graceful_timeout = settings.drain_timeout + 2 * CUT_GRACE  # a backstop: the drain is done here
    config.include_server_header = False
    config.accesslog = None  # api.exchange logs each request
    config.errorlog = logging.getLogger("hypercorn.error")
    config.errorlog.setLevel(logging.WARNING)  # its "Running on" line is ours to say
    # Kept: one worker in this process, no reloader, no read_timeout (it would cut an idle stream),
    # the Date header, max_app_queue_size (back-pressure on uploads), 60 s for lifespan start and end.
    return config


async def _listen(app: Quart, config: Config, stop: asyncio.Event) -> None:
    try:
        await hypercorn_serve(app, config, shutdown_trigger=stop.wait)
    finally:
        stop.set()


async def _beside(task: Task, stop: asyncio.Event) -> None:
    try:
        await task()
    except Exception:
        stop.set()
        raise


async def _wind_down(serving: asyncio.Task[None], drain: Drain, drain_timeout: float) -> None:
    """Hypercorn has stopped to accept; it ends when its last connection does."""
    _, running = await asyncio.wait({serving}, timeout=drain_timeout)
    if running:
        if cut := drain.cut():
            _log.warning("drain timeout: cut off what still runs", generations=cut)
        _, running = await asyncio.wait({serving}, timeout=CUT_GRACE)
    if running:
        serving.cancel()
        await asyncio.wait({serving})
    if not serving.cancelled():
        serving.result()


@contextmanager
def _stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """The first SIGTERM or SIGINT sets ``stop``; the second ends the process at once."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def on_signal(number: signal.Signals) -> None:
        if not stop.is_set():
            _log.info("stopping", signal=number.name)
            stop.set()
            return
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    for number in signals:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
