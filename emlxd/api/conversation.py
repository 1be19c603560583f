"""Messages as chat templates know them, which is OpenAI's chat shape, for the APIs that have another one."""

from __future__ import annotations

from collections.abc import Sequence

from emlxd.api.json_values import Json


def said(role: str, texts: Sequence[str]) -> Json:
    return {"role": role, "content": content(texts)}


def assistant(texts: Sequence[str], thoughts: Sequence[str], calls: Sequence[Json]) -> Json:
    """All that an assistant thought, said and called in one turn."""
    message: Json = {"role": "assistant", "content": content(texts) if texts else None}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = list(calls)
    return message


def tool_call(id: str, name: str, arguments: str) -> Json:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_result(call_id: str, texts: Sequence[str]) -> Json:
    return {"role": "tool", "tool_call_id": call_id, "content": content(texts)}


def tool_spec(name: str, description: str | None, parameters: Json | None) -> Json:
    """A function that may be called."""
    given = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in given.items() if value is not None}}


def content(texts: Sequence[str]) -> str | list[Json]:
    """Several texts stay apart: how to join them is the template's affair."""
    if len(texts) > 1:
        return [{"type": "text", "text": text} for text in texts]
    return "".join(texts)
