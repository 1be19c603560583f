"""The composition root: a bound port, the app on Hypercorn, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import structlog
from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config
from quart import Quart

from emlxd.api import surface
from emlxd.api.app import create_app
from emlxd.api.drain import Drain
from emlxd.config import ModelSettings, ServerSettings, Settings
from emlxd.errors import UserError
from emlxd.metrics import Metrics
from emlxd.registry import Registry
from emlxd.sources import fetch
from emlxd.worker.gate import Gate
from emlxd.worker.load import load_model
from emlxd.worker.worker import Worker, WorkerOptions

BACKLOG = 2048  # a burst of clients waits to be accepted instead of being dropped at 100
CUT_GRACE = 2.0  # seconds for the clients of cut streams to read the error event
_log = structlog.get_logger("emlxd.server")

Load = Callable[[], Awaitable[object]]


def run(settings: Settings) -> None:
    """Serve what ``settings`` say until told to stop. Raises UserError for what the user can mend."""
    listener = bind(settings.server)
    asyncio.run(_run(settings, listener))


async def _run(settings: Settings, listener: socket.socket) -> None:
    from emlxd import footprint
    from emlxd.graph import BLAS, device

    if BLAS.hint:
        _log.warning(BLAS.hint)
    footprint.apply_limits(settings.memory)
    gate = Gate()
    registry = Registry(settings.models, lambda model: _make_worker(model, gate))
    metrics = Metrics(device=device.current_device().kind)
    try:
        await serve(settings, registry, metrics, listener, load=registry.load)
    finally:
        await registry.close()


def _make_worker(model: ModelSettings, gate: Gate) -> Worker:
    options = WorkerOptions(
        name=model.name,
        max_queue=model.max_queue,
        prefill_chunk=model.prefill_chunk,
        prefill_slice=model.prefill_slice,
    )
    return Worker(options, lambda: load_model(model, fetch(model.source)), gate)


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
    load: Load | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until a signal or ``stop``, then finish what runs, at most ``server.drain_timeout`` seconds.

    ``load`` brings the models up while the server already answers /health and /ready; what it
    raises ends the server and is raised here.
    """
    drain = Drain()
    stop = stop or asyncio.Event()
    app = create_app(registry, settings, metrics, drain)
    with _stop_on_signals(stop):
        listener.listen(BACKLOG)  # before it is announced: who reads the line may connect
        announce(settings.server, registry, listener)
        config = hypercorn_config(settings.server, listener)
        serving = asyncio.create_task(_listen(app, config, stop))
        loading = asyncio.create_task(_load(load, stop))
        try:
            await stop.wait()
            drain.start()
            await _wind_down(serving, drain, settings.server.drain_timeout)
        finally:
            loading.cancel()
            await asyncio.wait({loading})
    if not loading.cancelled():
        loading.result()


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


async def _load(load: Load | None, stop: asyncio.Event) -> None:
    if load is None:
        return
    try:
        await load()
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
