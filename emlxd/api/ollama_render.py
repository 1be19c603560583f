"""Events of a generation to Ollama's objects: one a line, or all as one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import UTC, datetime

import orjson

from emlxd.api.errors import ollama_error
from emlxd.api.exchange import Exchange
from emlxd.api.json_values import Json
from emlxd.api.render import Said
from emlxd.core import Finished, PromptScored, ToolCallPiece
from emlxd.errors import EmlxdError

NANOSECONDS = 10**9


class OllamaRenderer(ABC):
    """``loading`` is how long the model took to load, in seconds. A tool call is sent when it is whole."""

    def __init__(self, exchange: Exchange, model: str, loading: float) -> None:
        self._exchange = exchange
        self._model = model
        self._loading = loading
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Json] = []
        self._open_call: tuple[str, list[str]] | None = None
        self._last: Json = {}

    def start(self) -> list[Json]:
        return []

    def event(self, prompt: int, event: Said) -> list[Json]:
        match event:
            case PromptScored():
                return []
            case ToolCallPiece(name=str(name)):
                lines = self._close_call()
                self._open_call = name, [event.arguments]
                return lines
            case ToolCallPiece():
                if self._open_call:
                    self._open_call[1].append(event.arguments)
                return []
            case Finished():
                lines = self._close_call()
                self._last = self._end(event)
                return [*lines, self._head() | self.said("") | self._last]
            case _:
                lines = self._close_call()
                thinks = event.channel == "reasoning"
                (self._thoughts if thinks else self._texts).append(event.text)
                text, thought = ("", event.text) if thinks else (event.text, "")
                return [*lines, self._head() | self.said(text, thought) | {"done": False}]

    def end(self) -> list[Json]:
        return []

    def failure(self, error: EmlxdError) -> list[Json]:
        return [ollama_error(error)]

    def result(self) -> Json:
        whole = self.said("".join(self._texts), "".join(self._thoughts), self._calls)
        return self._head() | whole | self._last

    @abstractmethod
    def said(self, text: str, thought: str = "", calls: list[Json] | None = None) -> Json:
        """The part of an object that holds what the model said."""

    def _close_call(self) -> list[Json]:
        if self._open_call is None:
            return []
        (name, parts), self._open_call = self._open_call, None
        arguments = "".join(parts)
        try:
            call = {"function": {"name": name, "arguments": orjson.loads(arguments)}}
        except ValueError:  # cut off in the middle: no call, but not lost either
            self._texts.append(arguments)
            return [self._head() | self.said(arguments) | {"done": False}]
        self._calls.append(call)
        return [self._head() | self.said("", calls=[call]) | {"done": False}]

    def _head(self) -> Json:
        return {"model": self._model, "created_at": timestamp(datetime.now(UTC))}

    def _end(self, finished: Finished) -> Json:
        usage, timing = finished.usage, finished.timing
        return {
            "done": True,
            "done_reason": "length" if finished.reason == "length" else "stop",
            "total_duration": nanoseconds(self._exchange.seconds),
            "load_duration": nanoseconds(self._loading),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(timing.prefill),
            "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds(timing.decode),
        }


class ChatRenderer(OllamaRenderer):
    def said(self, text: str, thought: str = "", calls: list[Json] | None = None) -> Json:
        message: Json = {"role": "assistant", "content": text}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class GenerateRenderer(OllamaRenderer):
    def said(self, text: str, thought: str = "", calls: list[Json] | None = None) -> Json:
        return {"response": text} | ({"thinking": thought} if thought else {})


def timestamp(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return round(seconds * NANOSECONDS)
