"""Events of a generation to Anthropic's message, as a stream of named events or as one object."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import orjson

from emlxd.api.errors import anthropic_error
from emlxd.api.json_values import Json
from emlxd.api.render import Said
from emlxd.core import Finished, PromptScored, TextPiece, ToolCallPiece, Usage
from emlxd.errors import EmlxdError

# Whole strings, so that no mark inside of one counts.
_MARKS: Final = re.compile(r'"(?:[^"\\]|\\.)*(?:"|$)|[{}\[\],]', re.DOTALL)
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class Block:
    """A block of the content while it grows: ``head`` is what it starts with, ``pieces`` what comes then."""

    def __init__(self, key: tuple[str, int], head: Json) -> None:
        self.key = key
        self.head = head
        self.pieces: list[str] = []

    @property
    def whole(self) -> Json:
        said = "".join(self.pieces)
        kind = self.head["type"]
        if kind == "tool_use":
            return self.head | {"input": _arguments(said)}
        return self.head | {kind: said}


class MessageRenderer:
    """``prompt_tokens`` is told at the start; how many of them were cached, only the end knows."""

    def __init__(self, request_id: str, model: str, prompt_tokens: int) -> None:
        self._id = f"msg_{request_id.removeprefix('req_')}"
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._blocks: list[Block] = []
        self._finished: Finished | None = None

    def start(self) -> list[Json]:
        usage = usage_object(Usage(self._prompt_tokens))
        return [{"type": "message_start", "message": self._message([], usage)}, {"type": "ping"}]

    def event(self, prompt: int, event: Said) -> list[Json]:
        head: Json
        match event:
            case PromptScored():
                return []
            case Finished():
                self._finished = event
                return [*self._stop(), self._message_delta(event)]
            case ToolCallPiece():
                head = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                return self._add(("tool_use", event.call), head, event.arguments)
            case TextPiece(channel="reasoning"):
                head = {"type": "thinking", "thinking": "", "signature": ""}
                return self._add(("thinking", 0), head, event.text)
            case TextPiece():
                return self._add(("text", 0), {"type": "text", "text": ""}, event.text)

    def end(self) -> list[Json]:
        return [{"type": "message_stop"}]

    def failure(self, error: EmlxdError) -> list[Json]:
        return [anthropic_error(error)]

    def result(self) -> Json:
        usage = self._finished.usage if self._finished else Usage()
        return self._message([block.whole for block in self._blocks], usage_object(usage))

    def _add(self, key: tuple[str, int], head: Json, piece: str) -> list[Json]:
        """More of the last block, or the first of the next one."""
        events: list[Json] = []
        if not self._blocks or self._blocks[-1].key != key:
            events = self._stop()
            self._blocks.append(Block(key, head))
            events.append({"type": "content_block_start", "index": self._index, "content_block": head})
        self._blocks[-1].pieces.append(piece)
        return [
            *events,
            {"type": "content_block_delta", "index": self._index, "delta": _delta(key[0], piece)},
        ]

    def _stop(self) -> list[Json]:
        return [{"type": "content_block_stop", "index": self._index}] if self._blocks else []

    @property
    def _index(self) -> int:
        return len(self._blocks) - 1

    def _message(self, content: list[Json], usage: Json) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **stop_fields(self._finished),
            "usage": usage,
        }

    def _message_delta(self, finished: Finished) -> Json:
        return {
            "type": "message_delta",
            "delta": stop_fields(finished),
            "usage": usage_object(finished.usage),
        }


def stop_fields(finished: Finished | None) -> Json:
    if finished is None:
        return {"stop_reason": None, "stop_sequence": None}
    if finished.stop_sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_sequence}
    return {"stop_reason": STOP_REASONS.get(finished.reason, "end_turn"), "stop_sequence": None}


def usage_object(usage: Usage) -> Json:
    """Anthropic counts cached input apart: the three kinds of input make up the prompt."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _delta(kind: str, piece: str) -> Json:
    match kind:
        case "tool_use":
            return {"type": "input_json_delta", "partial_json": piece}
        case "thinking":
            return {"type": "thinking_delta", "thinking": piece}
        case _:
            return {"type": "text_delta", "text": piece}


def _arguments(text: str) -> orjson.Fragment:
    """The object as it was written, to the last digit; of one that was cut off, its whole members."""
    return orjson.Fragment(next((json for json in (text, *_shortened(text)) if _is_json(json)), "{}"))


def _shortened(text: str) -> Iterator[str]:
    """What the beginning of an object may be closed to: after its last value, or before its last member."""
    if text.rstrip().endswith(('"', "}", "]")):  # a number might have had more digits
        yield f"{text}}}"
    depth, end = 0, 1
    for mark in _MARKS.finditer(text):
        depth += mark[0] in ("{", "[")
        depth -= mark[0] in ("}", "]")
        if mark[0] == "," and depth == 1:
            end = mark.start()
    yield f"{text[:end]}}}"


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
