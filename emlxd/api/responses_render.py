"""Events of a generation to OpenAI's response, as a stream of numbered events or as one object."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import count

from emlxd.api.logprobs import Json, token_objects
from emlxd.api.render import Said
from emlxd.api.surface import Tokenizer
from emlxd.core import Finished, PromptScored, TextPiece, ToolCallPiece, Usage
from emlxd.errors import EmlxdError, QueueFull

Keep = Callable[[Json], None]


class ResponseRenderer:
    """``head`` is what the response says of its request; ``keep`` is called with it when it is whole."""

    def __init__(self, id: str, head: Json, tokenizer: Tokenizer | None, keep: Keep | None) -> None:
        """``tokenizer`` where logprobs are asked for."""
        self._id = id
        self._head = {"id": f"resp_{id}", "object": "response", "created_at": int(time.time())} | head
        self._tokenizer = tokenizer
        self._keep = keep
        self._numbers = count()
        self._texts: list[str] = []
        self._logprobs: list[Json] = []
        self._finished: Finished | None = None

    def start(self) -> list[Json]:
        response = self._response("in_progress", [])
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def event(self, prompt: int, event: Said) -> list[Json]:
        if isinstance(event, PromptScored | ToolCallPiece):
            return []
        opening = [] if self._texts else self._open()
        if isinstance(event, TextPiece):
            return [*opening, self._delta(event)]
        self._finished = event
        if self._keep:
            self._keep(self.result())
        return [*opening, *self._close()]

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
        status = self._status()
        response = self._response(status, [self._message(status, [self._part()])])
        if self._finished:
            response["usage"] = usage_object(self._finished.usage)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _open(self) -> list[Json]:
        empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = self._message("in_progress", [])
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._text_event("response.content_part.added", part=empty),
        ]

    def _delta(self, piece: TextPiece) -> Json:
        logprobs = token_objects(self._tokenizer, piece.logprobs) if self._tokenizer else []
        self._texts.append(piece.text)
        self._logprobs += logprobs
        shown = _without_bytes(logprobs)
        return self._text_event("response.output_text.delta", delta=piece.text, logprobs=shown)

    def _close(self) -> list[Json]:
        part = self._part()
        shown = _without_bytes(part["logprobs"])
        item = self._message(self._status(), [part])
        return [
            self._text_event("response.output_text.done", text=part["text"], logprobs=shown),
            self._text_event("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=0, item=item),
        ]

    def _status(self) -> str:
        return "incomplete" if self._finished and self._finished.reason == "length" else "completed"

    def _part(self) -> Json:
        text = "".join(self._texts)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _message(self, status: str, content: list[Json]) -> Json:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    @property
    def _item_id(self) -> str:
        return f"msg_{self._id}"

    def _response(self, status: str, output: list[Json]) -> Json:
        return self._head | {"status": status, "output": output, "usage": None}

    def _text_event(self, type: str, **fields: object) -> Json:
        return self._event(type, item_id=self._item_id, output_index=0, content_index=0, **fields)

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
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
