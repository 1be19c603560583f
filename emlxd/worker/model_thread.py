"""The life of a thread that owns a model: it loads, runs and frees it; nothing else touches the device."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ClassVar, Final, Generic, TypeVar

from emlxd.core import ModelInfo
from emlxd.errors import EmlxdError, QueueFull, ServerFault, Unavailable
from emlxd.text.tokenizer import Tokenizer
from emlxd.worker.gate import Gate

LONG_TEXT: Final = 64 * 1024  # characters

Message = TypeVar("Message")
T = TypeVar("T")


class Close:
    """The last message of an inbox."""


class ModelThread(ABC, Generic[Message]):
    """One loaded model. Public methods are called on the event loop, abstract ones that begin with _ on the
    model's thread.
    """

    _doing: ClassVar[str]  # "The model failed while it ..."
    _smaller: ClassVar[str]  # "It ran out of memory. Try again, or ..."

    def __init__(self, name: str, gate: Gate) -> None:
        """Threads on one device share its ``gate``."""
        self.name = name
        self._gate = gate
        self._inbox: queue.SimpleQueue[Message | Close] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._loaded: Future[None] = Future()
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=f"worker-{name}", daemon=True)
        # Templates and tokenizers take milliseconds: too long for the event loop and for the device's thread.
        # Long texts take seconds, and queue by themselves.
        self._executors: list[ThreadPoolExecutor] = []
        self._text = self._new_executor("text")
        self._long_text = self._new_executor("long-text")
        self._heartbeat = time.monotonic()
        self._closing = False

    @property
    @abstractmethod
    def info(self) -> ModelInfo: ...

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer: ...

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether the thread has something to compute."""

    async def start(self) -> None:
        """Loads the model. Raises what loading raised; the thread is then of no more use."""
        self._thread.start()
        await _outcome(self._loaded)

    @property
    def alive(self) -> bool:
        """Whether the thread still serves requests."""
        return self._thread.is_alive() and not self._closing

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the thread last began a step, or 0 when it has nothing to do, or has ended."""
        works = self.busy and self._thread.is_alive()
        return time.monotonic() - self._heartbeat if works else 0.0

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``."""
        return await self._in_text_thread(
            lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens), len(text)
        )

    async def close(self) -> None:
        """Fails what still runs, frees the model and ends the thread."""
        self._closing = True
        self._inbox.put(Close())
        if self._thread.ident is not None:  # it could be started
            # Not a join on another thread: that one could not end either if this one is stuck.
            await _outcome(self._ended)
            self._thread.join()
        for executor in self._executors:
            executor.shutdown(wait=False, cancel_futures=True)

    def _new_executor(self, what: str) -> ThreadPoolExecutor:
        """A thread until the model's end."""
        self._executors.append(ThreadPoolExecutor(1, thread_name_prefix=f"{what}-{self.name}"))
        return self._executors[-1]

    def _send(self, message: Message) -> bool:
        """Gives whether the thread will read it: it may have ended meanwhile."""
        self._inbox.put(message)
        return self.alive

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"The model '{self.name}' is not available.")

    def _full(self) -> QueueFull:
        return QueueFull(f"The queue of the model '{self.name}' is full. Try again later.")

    def _fault(self, *, out_of_memory: bool) -> EmlxdError:
        """What the requests of a failed step end with."""
        if out_of_memory:
            return Unavailable(f"The model '{self.name}' ran out of memory. Try again, or {self._smaller}.")
        return ServerFault(f"The model '{self.name}' failed while it {self._doing}.")

    async def _in_text_thread(self, work: Callable[[], T], length: int = 0) -> T:
        """What ``work`` makes of a text of about ``length`` characters."""
        texts = self._long_text if length > LONG_TEXT else self._text
        return await self._loop.run_in_executor(texts, work)

    @abstractmethod
    def _open(self) -> None:
        """Loads the model. What it raises, ``start`` raises."""

    @abstractmethod
    def _serve(self) -> None:
        """Reads the inbox until ``Close`` comes."""

    @abstractmethod
    def _fail_rest(self, error: Unavailable) -> None:
        """Fails what is still wanted, and ends what needs no device: nothing more will be computed."""

    @abstractmethod
    def _free(self) -> None:
        """Frees the model."""

    def _run(self) -> None:
        try:
            self._own_model()
        finally:
            self._ended.set_result(None)

    def _own_model(self) -> None:
        try:
            self._open()
        except BaseException as error:
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(None)
        reason = self._unavailable()
        try:
            self._serve()
            reason = Unavailable(f"The model '{self.name}' is shutting down.")
        finally:
            self._closing = True
            self._fail_rest(reason)
            with self._gate:  # MLX locks up when models are freed while others compile or are freed
                self._free()


async def _outcome(future: Future[None]) -> None:
    """Waits for what the thread makes of ``future``, which is left alone if the waiting is cancelled."""
    await asyncio.shield(asyncio.wrap_future(future))
