"""POST /v1/completions."""

from __future__ import annotations

from quart import Blueprint, Response

from emlxd.api.body import read_object
from emlxd.api.exchange import current_exchange
from emlxd.api.fields import validate
from emlxd.api.generate import Prompt, lease, submit
from emlxd.api.render import Answer, CompletionRenderer, envelope
from emlxd.api.respond import respond
from emlxd.api.schema import CompletionBody
from emlxd.api.surface import Services, Worker
from emlxd.errors import RequestError


def routes(services: Services) -> Blueprint:
    blueprint = Blueprint("completions", __name__)
    server = services.settings.server

    @blueprint.post("/v1/completions")
    async def create_completion() -> Response:
        body = validate(CompletionBody, await read_object(server.max_body_bytes))
        worker = await lease(services, body.model)
        n = body.n or 1
        prompts = [await text_prompt(worker, prompt) for prompt in body.prompts]
        sources = submit(services, worker, prompts, body, body.token_limit)
        echoes = [echo_text(worker, prompt) if body.echo else "" for prompt in body.prompts]
        renderer = CompletionRenderer(
            envelope("cmpl", current_exchange().id, worker.name),
            [Answer(echo) for echo in echoes for _ in range(n)],
            n=n,
            include_usage=body.include_usage,
        )
        return await respond(renderer, sources, stream=bool(body.stream), heartbeat=server.heartbeat)

    return blueprint


async def text_prompt(worker: Worker, prompt: str | list[int]) -> Prompt:
    """Raises RequestError for a token id that the model does not have."""
    if isinstance(prompt, str):
        return Prompt(await worker.encode(prompt), "prompt")
    size = worker.info.vocab_size
    for token in prompt:
        if not 0 <= token < size:
            raise RequestError(
                f"Token id {token} is out of range; this model's are 0 to {size - 1}.",
                param="prompt",
                code="invalid_value",
            )
    return Prompt(prompt, "prompt")


def echo_text(worker: Worker, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else worker.tokenizer.decode(prompt)
