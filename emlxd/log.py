"""The log: structlog and the standard library's loggers in one format, on standard error."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import Processor

from emlxd.config import LogSettings

# Libraries that would say at `info` what emlxd says itself, or what nobody asked.
_QUIET = {
    "hypercorn.access": logging.CRITICAL,
    "asyncio": logging.WARNING,
    "watchfiles": logging.WARNING,
    "huggingface_hub": logging.ERROR,
    "httpx": logging.WARNING,
    "httpx2": logging.WARNING,
    "httpcore": logging.WARNING,
}


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is at the time: at times a progress bar's, which shows lines above it."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        pass


def configure(settings: LogSettings) -> None:
    """Send every log line to standard error, as text for people or as one JSON object.

    Calling it again replaces the earlier set-up, so a reload may change the level.
    """
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    json = settings.format == "json" or (settings.format == "auto" and not sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=json),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = _StandardError()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.PositionalArgumentsFormatter()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(json)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name, least in _QUIET.items():
        logging.getLogger(name).setLevel(max(level, least))
    for name in ("hypercorn.error", "quart.app"):
        # Both would write by themselves otherwise, each in a format of its own.
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def bind_request(request_id: str) -> None:
    """Put ``request_id`` on every line that the current task, and tasks it starts, log from now on."""
    structlog.contextvars.bind_contextvars(request_id=request_id)


def _renderers(json: bool) -> list[Processor]:
    # Tracebacks come without local variables, which may hold prompts and keys.
    if json:
        return [
            structlog.processors.ExceptionRenderer(
                structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
            ),
            structlog.processors.EventRenamer("message"),
            structlog.processors.JSONRenderer(default=str, ensure_ascii=False),
        ]
    return [
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    ]
