"""Events of a generation to OpenAI's response, as a stream of numbered events or as one object."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import count

from emlxd.api.json_values import Json
from emlxd.api.logprobs import token_objects
from emlxd.api.render import Said
from emlxd.api.surface import Tokenizer
from emlxd.core import Finished, PromptScored, TextPiece, ToolCallPiece, Usage
from emlxd.errors import EmlxdError, QueueFull

Keep = Callable[[Json], None]

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class OutputItem:
    """One item of the output while it grows: a message, thoughts, or a call of a function."""

    def __init__(self, kind: str, request: str, place: int, **head: str | None) -> None:
        self.kind = kind
        self.id = f"{PREFIXES[kind]}_{request}_{place}"
        self.place = place
        self.head = head
        self.pieces: list[str] = []
        self.logprobs: list[Json] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def part(self) -> Json:
        """The one part of the content of a message or of thoughts."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": [*self.logprobs]}

    def whole(self, status: str) -> Json:
        item = {"id": self.id, "type": self.kind, "status": status, **self.head}
        content = [] if status == "in_progress" else [self.part]
        match self.kind:
            case "message":
                return item | {"role": "assistant", "content": content}
            case "reasoning":
                return item | {"summary": [], "content": content}
            case _:
                return item | {"arguments": self.text}


class ResponseRenderer:
    """``head`` is what the response says of its request; ``keep`` is called with it when it is whole."""

    def __init__(self, id: str, head: Json, tokenizer: Tokenizer | None, keep: Keep | None) -> None:
        """``tokenizer`` where logprobs are asked for."""
        self._id = id
        self._head = {"id": f"resp_{id}", "object": "response", "created_at": int(time.time())} | head
        self._tokenizer = tokenizer
        self._keep = keep
        self._numbers = count()
        self._items: list[OutputItem] = []
        self._finished: Finished | None = None

    def start(self) -> list[Json]:
        response = self._response("in_progress", [])
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def event(self, prompt: int, event: Said) -> list[Json]:
        match event:
            case PromptScored():
                return []
            case TextPiece(channel="reasoning"):
                return [*self._turn_to("reasoning"), *self._add(event.text)]
            case TextPiece():
                return [*self._turn_to("message"), *self._say(event)]
            case ToolCallPiece(name=str()):
                opening = self._open("function_call", call_id=event.id, name=event.name)
                return [*opening, *self._add(event.arguments)]
            case ToolCallPiece():
                return self._add(event.arguments)
            case Finished():
                return self._finish(event)

    def end(self) -> list[Json]:
        response = self.result()
        return [self._event(f"response.{response['status']}", response=response)]

    def failure(self, error: EmlxdError) -> list[Json]:
        code = "rate_limit_exceeded" if isinstance(error, QueueFull) else "server_error"
        failed = self._response("failed", []) | {"error": {"code": code, "message": error.message}}
        return [
            self._event("error", code=error.code, message=error.message, param=error.param),
            self._event("response.failed", response=failed),
        ]

    def result(self) -> Json:
        output = [item.whole("completed") for item in self._items[:-1]]
        output += [item.whole(self._status) for item in self._items[-1:]]
        response = self._response(self._status, output)
        if self._finished:
            response["usage"] = usage_object(self._finished.usage)
        if self._status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _finish(self, event: Finished) -> list[Json]:
        opening = [] if self._items else self._open("message")  # an answer of nothing is a message too
        self._finished = event
        closing = self._close(self._status)
        if self._keep:
            self._keep(self.result())
        return [*opening, *closing]

    def _turn_to(self, kind: str) -> list[Json]:
        """Go on with an item of ``kind``."""
        return [] if self._items and self._items[-1].kind == kind else self._open(kind)

    def _open(self, kind: str, **head: str | None) -> list[Json]:
        closing = self._close("completed")
        item = OutputItem(kind, self._id, len(self._items), **head)
        self._items.append(item)
        shown = item.whole("in_progress")
        events = [self._event("response.output_item.added", output_index=item.place, item=shown)]
        if kind != "function_call":
            events.append(self._part_event("response.content_part.added", part=item.part))
        return [*closing, *events]

    def _add(self, text: str) -> list[Json]:
        """More of thoughts or of a call's arguments."""
        item = self._items[-1]
        item.pieces.append(text)
        if item.kind == "reasoning":
            return [self._part_event("response.reasoning_text.delta", delta=text)]
        if not text:
            return []
        return [self._item_event("response.function_call_arguments.delta", delta=text)]

    def _say(self, piece: TextPiece) -> list[Json]:
        item = self._items[-1]
        logprobs = token_objects(self._tokenizer, piece.logprobs) if self._tokenizer else []
        item.pieces.append(piece.text)
        item.logprobs += logprobs
        shown = _without_bytes(logprobs)
        return [self._part_event("response.output_text.delta", delta=piece.text, logprobs=shown)]

    def _close(self, status: str) -> list[Json]:
        """The end of the last item, if there is one."""
        if not self._items:
            return []
        item = self._items[-1]
        match item.kind:
            case "message":
                logprobs = _without_bytes(item.logprobs)
                events = [self._part_event("response.output_text.done", text=item.text, logprobs=logprobs)]
            case "reasoning":
                events = [self._part_event("response.reasoning_text.done", text=item.text)]
            case _:
                done = "response.function_call_arguments.done"
                events = [self._item_event(done, arguments=item.text, name=item.head["name"])]
        if item.kind != "function_call":
            events.append(self._part_event("response.content_part.done", part=item.part))
        shown = item.whole(status)
        return [
            *events,
            self._event("response.output_item.done", output_index=item.place, item=shown),
        ]

    @property
    def _status(self) -> str:
        return "incomplete" if self._finished and self._finished.reason == "length" else "completed"

    def _response(self, status: str, output: list[Json]) -> Json:
        return self._head | {"status": status, "output": output, "usage": None}

    def _part_event(self, type: str, **fields: object) -> Json:
        return self._item_event(type, content_index=0, **fields)

    def _item_event(self, type: str, **fields: object) -> Json:
        item = self._items[-1]
        return self._event(type, item_id=item.id, output_index=item.place, **fields)

    def _event(self, type: str, **fields: object) -> Json:
        return {"type": type, "sequence_number": next(self._numbers), **fields}


def _without_bytes(logprobs: Iterable[Json]) -> list[Json]:
    """Logprobs as events have them; items have the bytes too."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [
                {"token": likely["token"], "logprob": likely["logprob"]} for likely in entry["top_logprobs"]
            ],
        }
        for entry in logprobs
    ]


def usage_object(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
