"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quart import Blueprint, Response

from emlxd.api.body import read_checked
from emlxd.api.exchange import current_exchange
from emlxd.api.fields import read_body, validate
from emlxd.api.generate import lease, submit
from emlxd.api.json_values import json_response
from emlxd.api.messages_render import MessageRenderer
from emlxd.api.messages_schema import MessagesBody, MessagesPrompt
from emlxd.api.offload import LARGE_COUNT, offload
from emlxd.api.prompts import Prompt, shaped
from emlxd.api.respond import respond
from emlxd.api.shapes import wishes
from emlxd.api.surface import Services, Worker
from emlxd.text.dialect import Wishes


def routes(services: Services) -> Blueprint:
    blueprint = Blueprint("messages", __name__)
    server = services.settings.server

    @blueprint.post("/v1/messages")
    async def create_message() -> Response:
        body, asked = await read_checked(messages_body, server.max_body_bytes)
        worker = await lease(services, body.model)
        prompt = await shaped(worker, await messages_prompt(worker, body), asked)
        runs = submit(services, worker, [prompt], body)
        renderer = MessageRenderer(current_exchange().id, worker.name, len(prompt.tokens))
        return await respond(renderer, runs, stream=bool(body.stream), heartbeat=server.heartbeat, named=True)

    @blueprint.post("/v1/messages/count_tokens")
    async def count_tokens() -> Response:
        body = await read_body(MessagesPrompt, server.max_body_bytes)
        worker = await lease(services, body.model)
        return json_response({"input_tokens": len((await messages_prompt(worker, body)).tokens)})

    return blueprint


def messages_body(data: Mapping[str, Any]) -> tuple[MessagesBody, Wishes]:
    """Raises RequestError."""
    body = validate(MessagesBody, data)
    return body, wishes(body)


async def messages_prompt(worker: Worker, body: MessagesPrompt) -> Prompt:
    messages = await offload(body.for_template, large=len(body.messages) > LARGE_COUNT)
    tokens = await worker.encode_chat(
        messages,
        add_generation_prompt=not body.continues,
        continue_final_message=body.continues,
        tools=body.calling.for_template,
        **body.thinking_variables,
    )
    return Prompt(tokens, "messages", continues=body.continues)
