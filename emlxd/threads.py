"""Slow work on threads of its own: downloads, large bodies, the headers of large files."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T]) -> T:
    """The result of ``work``, run on a thread of its own that does not keep the process from ending."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # whoever waits may be cancelled; the work goes on

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="in-thread", daemon=True).start()
    return await asyncio.wrap_future(done)
