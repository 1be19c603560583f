"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quart import Blueprint, Response

from emlxd.api.body import read_checked
from emlxd.api.exchange import current_exchange
from emlxd.api.fields import validate
from emlxd.api.generate import lease, submit
from emlxd.api.prompts import shaped, text_prompt
from emlxd.api.render import CompletionRenderer, Echo, envelope
from emlxd.api.respond import respond
from emlxd.api.schema import CompletionBody
from emlxd.api.surface import Services, Worker
from emlxd.text.dialect import Wishes


def routes(services: Services) -> Blueprint:
    blueprint = Blueprint("completions", __name__)
    server = services.settings.server

    @blueprint.post("/v1/completions")
    async def create_completion() -> Response:
        body, asked = await read_checked(completion_body, server.max_body_bytes)
        worker = await lease(services, body.model)
        prompts = [await text_prompt(worker, prompt, scored=body.scores_prompt) for prompt in body.prompts]
        if asked.grammar:
            prompts = [await shaped(worker, prompt, asked) for prompt in prompts]
        runs = submit(services, worker, prompts, body)
        renderer = CompletionRenderer(
            envelope("cmpl", current_exchange().id, worker.name),
            None if body.logprobs is None else worker.tokenizer,
            [
                Echo(_echo_text(worker, given), prompt.tokens) if body.echo else None
                for given, prompt in zip(body.prompts, prompts, strict=True)
            ],
            n=body.answers,
            include_usage=body.include_usage,
        )
        return await respond(renderer, runs, stream=bool(body.stream), heartbeat=server.heartbeat)

    return blueprint


def completion_body(data: Mapping[str, Any]) -> tuple[CompletionBody, Wishes]:
    """Raises RequestError."""
    body = validate(CompletionBody, data)
    return body, Wishes(grammar=body.text_grammar, plain=True)


def _echo_text(worker: Worker, prompt: str | list[int]) -> str:
    """Special tokens are written out: the client gave them."""
    if isinstance(prompt, str):
        return prompt
    return worker.tokenizer.decode(prompt, skip_special_tokens=False)
