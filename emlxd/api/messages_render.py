"""Events of a generation to Anthropic's message, as a stream of named events or as one object."""

from __future__ import annotations

from emlxd.api.errors import anthropic_error
from emlxd.api.logprobs import Json
from emlxd.api.render import Said
from emlxd.core import Finished, PromptScored, ToolCallPiece, Usage
from emlxd.errors import EmlxdError

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageRenderer:
    """``prompt_tokens`` is told at the start; how many of them were cached, only the end knows."""

    def __init__(self, request_id: str, model: str, prompt_tokens: int) -> None:
        self._id = f"msg_{request_id.removeprefix('req_')}"
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._texts: list[str] = []
        self._finished: Finished | None = None

    def start(self) -> list[Json]:
        usage = usage_object(Usage(self._prompt_tokens))
        return [{"type": "message_start", "message": self._message([], usage)}, {"type": "ping"}]

    def event(self, prompt: int, event: Said) -> list[Json]:
        if isinstance(event, PromptScored | ToolCallPiece):
            return []
        if isinstance(event, Finished):
            self._finished = event
            stop = [{"type": "content_block_stop", "index": 0}] if self._texts else []
            return [*stop, self._message_delta(event)]
        opening = [] if self._texts else [_block_start()]
        self._texts.append(event.text)
        delta = {"type": "text_delta", "text": event.text}
        return [*opening, {"type": "content_block_delta", "index": 0, "delta": delta}]

    def end(self) -> list[Json]:
        return [{"type": "message_stop"}]

    def failure(self, error: EmlxdError) -> list[Json]:
        return [anthropic_error(error)]

    def result(self) -> Json:
        text = "".join(self._texts)
        content = [{"type": "text", "text": text}] if self._texts else []
        return self._message(content, usage_object(self._finished.usage if self._finished else Usage()))

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


def _block_start() -> Json:
    return {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
