"""Events of a generation to OpenAI's objects, as chunks or as one.

A renderer takes every event through ``event`` whether the client streams or not, and remembers what
it took; ``result`` is that, whole. So a stream and its non-stream twin cannot differ.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from emlxd.api.errors import error_object
from emlxd.api.json_values import Json
from emlxd.api.logprobs import TextLogprobs, join_parts, token_objects
from emlxd.api.surface import Tokenizer
from emlxd.core import Finished, PromptScored, TextPiece, TokenLogprob, ToolCallPiece, Usage
from emlxd.errors import EmlxdError
from emlxd.version import package_version

Said = PromptScored | TextPiece | ToolCallPiece | Finished
"""The events that are left once failures are raised."""


class Renderer(Protocol):
    """``start``, ``event``, and ``end`` or ``failure`` give the chunks to send; ``result`` the whole answer,
    which has gone through ``start`` and ``event`` too.

    ``event`` is told which of the request's prompts an event belongs to.
    """

    def start(self) -> list[Json]: ...
    def event(self, prompt: int, event: Said) -> list[Json]: ...
    def end(self) -> list[Json]: ...
    def failure(self, error: EmlxdError) -> list[Json]: ...
    def result(self) -> Json: ...


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
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


class Answer:
    """What is known of one choice so far: text, thinking, calls and logprobs in the shape of their API,
    and its end."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[Json] = []
        self.logprobs: list[Json] = []
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
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
    )


class ChoiceRenderer(ABC):
    """What chat and text completions share: an envelope with ``choices`` and ``usage``.

    Choice ``i * n + j`` is the j-th of the ``n`` answers to prompt i.
    """

    chunk_object: ClassVar[str]
    whole_object: ClassVar[str]

    def __init__(self, envelope: Json, *, prompts: int, n: int, include_usage: bool) -> None:
        self._envelope = envelope
        self._n = n
        self._include_usage = include_usage
        self._answers = [Answer() for _ in range(prompts * n)]

    def start(self) -> list[Json]:
        return []

    def event(self, prompt: int, event: Said) -> list[Json]:
        if isinstance(event, PromptScored | ToolCallPiece):
            return []
        index = prompt * self._n + event.index
        answer = self._answers[index]
        if isinstance(event, Finished):
            answer.finished = event
            return [self._chunk(self._delta(index, None, None, event.reason))]
        return [self._say(index, event.text, self._logprobs(index, event.logprobs))]

    def end(self) -> list[Json]:
        if not self._include_usage:
            return []
        return [self._chunk(None) | {"usage": self._usage()}]

    def failure(self, error: EmlxdError) -> list[Json]:
        return [error_object(error)]

    def result(self) -> Json:
        choices = [self._whole(index, answer) for index, answer in enumerate(self._answers)]
        return {"object": self.whole_object, **self._envelope, "choices": choices, "usage": self._usage()}

    def _say(self, index: int, text: str, logprobs: Json | None) -> Json:
        """The chunk that adds ``text`` to an answer."""
        answer = self._answers[index]
        answer.texts.append(text)
        if logprobs is not None:
            answer.logprobs.append(logprobs)
        return self._chunk(self._delta(index, text, logprobs, None))

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
    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> Json | None: ...

    @abstractmethod
    def _delta(self, index: int, text: str | None, logprobs: Json | None, reason: str | None) -> Json: ...

    @abstractmethod
    def _whole(self, index: int, answer: Answer) -> Json: ...


class ChatRenderer(ChoiceRenderer):
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, envelope: Json, tokenizer: Tokenizer | None, *, n: int, include_usage: bool) -> None:
        """``tokenizer`` where logprobs are asked for."""
        super().__init__(envelope, prompts=1, n=n, include_usage=include_usage)
        self._tokenizer = tokenizer

    def start(self) -> list[Json]:
        return [
            self._chunk(_choice(index, "delta", {"role": "assistant", "content": ""}, None, None))
            for index in range(len(self._answers))
        ]

    def event(self, prompt: int, event: Said) -> list[Json]:
        match event:
            case ToolCallPiece():
                return [self._call(event)]
            case TextPiece(channel="reasoning"):
                self._answers[event.index].thoughts.append(event.text)
                delta = {"reasoning_content": event.text, "reasoning": event.text}
                return [self._chunk(_choice(event.index, "delta", delta, None, None))]
            case _:
                return super().event(prompt, event)

    def _call(self, piece: ToolCallPiece) -> Json:
        """The chunk that adds to a tool call, or begins one."""
        calls = self._answers[piece.index].calls
        function = {"arguments": piece.arguments}
        call: Json = {"index": piece.call}
        if piece.name is not None:
            call |= {"id": piece.id, "type": "function"}
            function = {"name": piece.name, **function}
            calls.append({"id": piece.id, "type": "function", "function": {**function}})
        else:
            calls[piece.call]["function"]["arguments"] += piece.arguments
        delta = {"tool_calls": [call | {"function": function}]}
        return self._chunk(_choice(piece.index, "delta", delta, None, None))

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> Json | None:
        if self._tokenizer is None:
            return None
        return {"content": token_objects(self._tokenizer, entries), "refusal": None}

    def _delta(self, index: int, text: str | None, logprobs: Json | None, reason: str | None) -> Json:
        return _choice(index, "delta", {} if text is None else {"content": text}, logprobs, reason)

    def _whole(self, index: int, answer: Answer) -> Json:
        said = answer.text if answer.text or not answer.calls else None
        message: Json = {"role": "assistant", "content": said, "refusal": None}
        if answer.thoughts:
            message["reasoning_content"] = message["reasoning"] = "".join(answer.thoughts)
        if answer.calls:
            message["tool_calls"] = answer.calls
        logprobs = None
        if self._tokenizer is not None:
            content = [token for part in answer.logprobs for token in part["content"]]
            logprobs = {"content": content, "refusal": None}
        return _choice(index, "message", message, logprobs, answer.reason)


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that its answers begin with."""

    text: str
    tokens: Sequence[int]


class CompletionRenderer(ChoiceRenderer):
    """An echoed prompt comes first in its answers, at once or, with logprobs, when it is scored."""

    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(
        self,
        envelope: Json,
        tokenizer: Tokenizer | None,
        echoes: Sequence[Echo | None],
        *,
        n: int,
        include_usage: bool,
    ) -> None:
        """``tokenizer`` where logprobs are asked for."""
        super().__init__(envelope, prompts=len(echoes), n=n, include_usage=include_usage)
        self._echoes = [echo for echo in echoes for _ in range(n)]
        self._texts = None if tokenizer is None else [TextLogprobs(tokenizer) for _ in self._answers]

    def start(self) -> list[Json]:
        if self._texts is not None:
            return []
        return [self._say(index, echo.text, None) for index, echo in enumerate(self._echoes) if echo]

    def event(self, prompt: int, event: Said) -> list[Json]:
        if not isinstance(event, PromptScored):
            return super().event(prompt, event)
        chunks = []
        for index in range(prompt * self._n, (prompt + 1) * self._n):
            echo = self._echoes[index]
            if echo and self._texts:
                logprobs = self._texts[index].prompt(echo.text, echo.tokens, event.logprobs)
                chunks.append(self._say(index, echo.text, logprobs))
        return chunks

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> Json | None:
        return None if self._texts is None else self._texts[index].answer(entries)

    def _delta(self, index: int, text: str | None, logprobs: Json | None, reason: str | None) -> Json:
        return _choice(index, "text", text or "", logprobs, reason)

    def _whole(self, index: int, answer: Answer) -> Json:
        logprobs = None if self._texts is None else join_parts(answer.logprobs)
        return _choice(index, "text", answer.text, logprobs, answer.reason)


def _choice(index: int, key: str, value: Any, logprobs: Json | None, reason: str | None) -> Json:
    return {"index": index, key: value, "logprobs": logprobs, "finish_reason": reason}
