"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quart import Blueprint, Response

from emlxd.api.body import read_checked
from emlxd.api.exchange import current_exchange
from emlxd.api.fields import validate
from emlxd.api.generate import lease, submit
from emlxd.api.prompts import chat_prompt, shaped
from emlxd.api.render import ChatRenderer, envelope
from emlxd.api.respond import respond
from emlxd.api.schema import ChatBody
from emlxd.api.shapes import wishes
from emlxd.api.surface import Services
from emlxd.text.dialect import Wishes


def routes(services: Services) -> Blueprint:
    blueprint = Blueprint("chat", __name__)
    server = services.settings.server

    @blueprint.post("/v1/chat/completions")
    async def create_chat_completion() -> Response:
        body, asked = await read_checked(chat_body, server.max_body_bytes)
        worker = await lease(services, body.model)
        prompt = await shaped(worker, await chat_prompt(worker, body), asked)
        runs = submit(services, worker, [prompt], body)
        renderer = ChatRenderer(
            envelope("chatcmpl", current_exchange().id, worker.name),
            worker.tokenizer if body.logprobs else None,
            n=body.answers,
            include_usage=body.include_usage,
        )
        return await respond(renderer, runs, stream=bool(body.stream), heartbeat=server.heartbeat)

    return blueprint


def chat_body(data: Mapping[str, Any]) -> tuple[ChatBody, Wishes]:
    """Raises RequestError."""
    body = validate(ChatBody, data)
    return body, wishes(body)
