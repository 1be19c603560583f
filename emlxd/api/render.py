"""Events of a generation to OpenAI's objects, as chunks or as one.

A renderer takes every event through ``event`` whether the client streams or not, and remembers what
it took; ``result`` is that, whole. So a stream and its non-stream twin cannot differ.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

import orjson
from quart import Response

from emlxd.core import Finished, PromptScored, TextPiece, Usage
from emlxd.metrics import package_version

Json = dict[str, Any]
Said = PromptScored | TextPiece | Finished  # what is left of the events once failures are raised


class Renderer(Protocol):
    """``start``, ``event`` and ``end`` give the chunks to send; ``result`` the whole answer."""

    def start(self) -> list[Json]: ...
    def event(self, index: int, event: Said) -> list[Json]: ...
    def end(self) -> list[Json]: ...
    def result(self) -> Json: ...


def json_response(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, content_type="application/json")


def envelope(prefix: str, request_id: str, model: str) -> Json:
    """What every object and chunk of one answer repeats. The id tells the request's id again."""
    return {
        "id": f"{prefix}-{request_id.removeprefix('req_')}",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"emlxd-{package_version()}",
    }


def usage_object(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Answer:
    """What is known of one choice so far."""

    def __init__(self, text: str = "") -> None:
        self.texts = [text]
        self.finished: Finished | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reason(self) -> str | None:
        return self.finished.reason if self.finished else None


def total_usage(answers: list[Answer], n: int) -> Usage:
    """A prompt counts once, however many of its ``n`` answers read it."""
    usages = [answer.finished.usage if answer.finished else Usage() for answer in answers]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages[::n]),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages[::n]),
    )


class ChoiceRenderer(ABC):
    """What chat and text completions share: an envelope with ``choices`` and ``usage``."""

    chunk_object: ClassVar[str]
    whole_object: ClassVar[str]

    def __init__(self, envelope: Json, answers: list[Answer], *, n: int, include_usage: bool) -> None:
        self._envelope = envelope
        self._answers = answers
        self._n = n
        self._include_usage = include_usage

    def start(self) -> list[Json]:
        return []

    def event(self, index: int, event: Said) -> list[Json]:
        answer = self._answers[index]
        if isinstance(event, Finished):
            answer.finished = event
            return [self._chunk(self._delta(index, None, event.reason))]
        if isinstance(event, PromptScored):
            return []  # no body may ask for it
        answer.texts.append(event.text)
        return [self._chunk(self._delta(index, event.text, None))]

    def end(self) -> list[Json]:
        if not self._include_usage:
            return []
        return [self._chunk(None) | {"usage": self._usage()}]

    def result(self) -> Json:
        choices = [self._whole(index, answer) for index, answer in enumerate(self._answers)]
        return {"object": self.whole_object, **self._envelope, "choices": choices, "usage": self._usage()}

    def _chunk(self, choice: Json | None) -> Json:
        chunk = {
            "object": self.chunk_object,
            **self._envelope,
            "choices": [] if choice is None else [choice],
        }
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def _usage(self) -> Json:
        return usage_object(total_usage(self._answers, self._n))

    @abstractmethod
    def _delta(self, index: int, text: str | None, reason: str | None) -> Json: ...

    @abstractmethod
    def _whole(self, index: int, answer: Answer) -> Json: ...


class ChatRenderer(ChoiceRenderer):
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def start(self) -> list[Json]:
        return [
            self._chunk(_choice(index, "delta", {"role": "assistant", "content": ""}, None))
            for index in range(len(self._answers))
        ]

    def _delta(self, index: int, text: str | None, reason: str | None) -> Json:
        return _choice(index, "delta", {} if text is None else {"content": text}, reason)

    def _whole(self, index: int, answer: Answer) -> Json:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return _choice(index, "message", message, answer.reason)


class CompletionRenderer(ChoiceRenderer):
    """An echoed prompt is the text that its answer starts with."""

    chunk_object = "text_completion"
    whole_object = "text_completion"

    def start(self) -> list[Json]:
        return [
            self._chunk(_choice(index, "text", answer.text, None))
            for index, answer in enumerate(self._answers)
            if answer.text
        ]

    def _delta(self, index: int, text: str | None, reason: str | None) -> Json:
        return _choice(index, "text", text or "", reason)

    def _whole(self, index: int, answer: Answer) -> Json:
        return _choice(index, "text", answer.text, answer.reason)


def _choice(index: int, key: str, value: Any, reason: str | None) -> Json:
    return {"index": index, key: value, "logprobs": None, "finish_reason": reason}
