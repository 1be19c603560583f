"""A bound port, the app on Hypercorn, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import structlog
from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config
from hypercorn.typing import ASGIFramework, ASGIReceiveCallable, ASGISendCallable, Scope
from quart import Quart

from emlxd.api import surface
from emlxd.api.app import create_app
from emlxd.api.drain import Drain
from emlxd.api.response_store import ResponseStore
from emlxd.config import ServerSettings, Settings
from emlxd.errors import UserError
from emlxd.keys import read_keys
from emlxd.metrics import Metrics
from emlxd.tracing import Tracer

BACKLOG = 2048  # a burst of clients waits to be accepted instead of being dropped at 100
IDLE_GRACE = 0.5  # seconds without a request after which nothing more is expected
CUT_GRACE = 2.0  # seconds for the clients of cut streams to read the error event
_log = structlog.get_logger("emlxd.server")

Task = Callable[[], Awaitable[object]]


class Front:
    """The app that answers. A reload puts another one in its place; what runs ends in the old one."""

    def __init__(
        self,
        registry: surface.Registry,
        metrics: Metrics,
        operator: surface.Operator | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.registry = registry
        self.operator = operator
        self.drain = Drain()
        self.requests = 0  # that are being answered
        self._metrics = metrics
        self._tracer = tracer
        self._responses = ResponseStore()
        self._app: Quart

    def prepare(self, settings: Settings) -> Callable[[], None]:
        """Checks what the app needs of ``settings``, and gives what puts them in force. Raises UserError."""
        app = create_app(
            self.registry,
            settings,
            self._metrics,
            self.drain,
            self.operator,
            self._tracer,
            self._responses,
        )

        def put_in_force() -> None:
            self._app, self.settings = app, settings

        return put_in_force

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self.requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.requests -= 1


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
    front: Front,
    listener: socket.socket,
    *,
    tasks: Sequence[Task] = (),
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until a signal or ``stop``, then finish what runs, at most ``server.drain_timeout`` seconds.

    ``tasks`` run beside it, from the moment that it answers /health and /ready: loading models, watching
    workers. What one of them raises ends the server and is raised here.
    """
    stop = stop or asyncio.Event()
    front.prepare(settings)()
    with _stop_on_signals(stop):
        listener.listen(BACKLOG)  # before it is announced: who reads the line may connect
        announce(settings.server, front.registry, listener)
        serving = asyncio.create_task(_listen(front, hypercorn_config(listener), stop))
        running = [asyncio.create_task(_stop_if_it_fails(task, stop)) for task in tasks]
        try:
            await stop.wait()
            front.drain.start()
            await _wind_down(serving, front, front.settings.server.drain_timeout)
        finally:
            for task in running:
                task.cancel()
            ends = await asyncio.gather(*running, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end


def announce(settings: ServerSettings, registry: surface.Registry, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    names = [entry.name for entry in registry.models]
    url = f"http://{_url_host(settings.host)}:{port}"
    print(f"emlxd serves {', '.join(names) or 'no models'} at {url}/v1, and a page at {url}/", flush=True)
    chats = [entry.name for entry in registry.models if entry.kind in ("chat", None)]
    if chats:
        print(*how_to_call(url, chats[0], keys=bool(read_keys(settings))), sep="\n", flush=True)


def how_to_call(url: str, model: str, *, keys: bool) -> tuple[str, str]:
    """One line for a shell and one for Python. A key is the reader's to fill in."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    key = "-H 'Authorization: Bearer KEY' " if keys else ""
    client = f'OpenAI(base_url="{url}/v1", api_key="{"KEY" if keys else "unused"}")'
    return (
        f"  curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{body}'",
        f"  from openai import OpenAI; print({client}.chat.completions.create(**{body}))",
    )


def hypercorn_config(listener: socket.socket) -> Config:
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
    config.graceful_timeout = 24 * 3600.0  # the drain is done here
    config.include_server_header = False
    config.accesslog = None  # api.exchange logs each request
    config.errorlog = logging.getLogger("hypercorn.error")
    config.errorlog.setLevel(logging.WARNING)  # its "Running on" line is ours to say
    # Kept: one worker in this process, no reloader, no read_timeout (it would cut an idle stream),
    # the Date header, max_app_queue_size (back-pressure on uploads), 60 s for lifespan start and end.
    return config


async def _listen(front: Front, config: Config, stop: asyncio.Event) -> None:
    """Answers requests until ``stop``, which is also set if Hypercorn ends by itself."""
    try:
        await hypercorn_serve(cast(ASGIFramework, front), config, shutdown_trigger=stop.wait)
    finally:
        stop.set()


async def _stop_if_it_fails(task: Task, stop: asyncio.Event) -> None:
    """Runs ``task``, whose failure stops the server."""
    try:
        await task()
    except Exception:
        stop.set()
        raise


async def _wind_down(serving: asyncio.Task[None], front: Front, drain_timeout: float) -> None:
    """Hypercorn has stopped to accept; it ends when its last connection does, or is ended before."""
    drain = front.drain
    if drain.running:
        _log.info(
            "finishing what runs; another signal ends it at once",
            generations=len(drain.running),
            at_most_seconds=drain_timeout,
        )
    await _quiet(serving, front, drain_timeout)
    if not serving.done() and front.requests:
        if cut := drain.cut():
            _log.warning("drain timeout: cut off what still runs", generations=cut)
        await asyncio.wait({serving}, timeout=CUT_GRACE)
    if not serving.done():
        serving.cancel()
        await asyncio.wait({serving})
    if not serving.cancelled():
        serving.result()


async def _quiet(serving: asyncio.Task[None], front: Front, limit: float) -> None:
    """Waits until the server has ended, or nothing is asked of it on the connections that are left.

    Of HTTP/2 they are not closed by Hypercorn. At most ``limit`` seconds.
    """
    end = asyncio.get_running_loop().time() + limit
    while (left := end - asyncio.get_running_loop().time()) > 0:
        idle = not front.requests
        await asyncio.wait({serving}, timeout=min(left, IDLE_GRACE))
        if serving.done() or (idle and not front.requests):
            return


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
