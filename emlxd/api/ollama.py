"""Ollama's /api/chat, generate, embed, embeddings and version, for clients that know no other API.

Models are those of config.yaml, with weights and contexts as they are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from quart import Blueprint, Response

from emlxd.api import embeddings, ollama_schema
from emlxd.api.body import read_checked
from emlxd.api.embeddings import shortened, vectors_response
from emlxd.api.exchange import current_exchange
from emlxd.api.fields import read_body, validate
from emlxd.api.generate import Events, Run, lease, submit
from emlxd.api.json_values import Json, json_response
from emlxd.api.ollama_models import known_name
from emlxd.api.ollama_render import ChatRenderer, GenerateRenderer, OllamaRenderer, nanoseconds, timestamp
from emlxd.api.prompts import chat_prompt, shaped, text_prompt
from emlxd.api.respond import respond
from emlxd.api.schema import ChatBody
from emlxd.api.shapes import wishes
from emlxd.api.sse import line_response
from emlxd.api.surface import Services, Worker
from emlxd.text.dialect import Wishes
from emlxd.version import package_version

Asked = tuple[ChatBody, Wishes]


def routes(services: Services) -> Blueprint:
    blueprint = Blueprint("ollama", __name__)
    limit = services.settings.server.max_body_bytes

    @blueprint.post("/api/chat")
    async def chat() -> Response:
        asked, found = await read_checked(chat_body, limit)
        if found is None:
            return await _load(services, asked.model, {"message": {"role": "assistant", "content": ""}})
        body, wish = found
        worker, loading = await _leased(services, asked.model)
        prompt = await shaped(worker, await chat_prompt(worker, body), wish)
        renderer = ChatRenderer(current_exchange(), asked.model, loading)
        return await _answer(renderer, submit(services, worker, [prompt], body), stream=asked.streams)

    @blueprint.post("/api/generate")
    async def generate() -> Response:
        asked, found = await read_checked(generate_body, limit)
        if found is None or not asked.prompt:
            return await _load(services, asked.model, {"response": ""})
        body, wish = found
        worker, loading = await _leased(services, asked.model)
        raw = await text_prompt(worker, asked.prompt) if asked.raw else None
        prompt = await shaped(worker, raw or await chat_prompt(worker, body), wish)
        renderer = GenerateRenderer(current_exchange(), asked.model, loading)
        return await _answer(renderer, submit(services, worker, [prompt], body), stream=asked.streams)

    @blueprint.post("/api/embed")
    async def embed() -> Response:
        body = await read_body(ollama_schema.OllamaEmbedBody, limit)
        worker, loading = await _leased(services, body.model)
        truncate = body.truncate is not False
        lengths, vectors = await embeddings.embed(services, worker, body.input, truncate=truncate)
        head = {
            "model": body.model,
            "total_duration": nanoseconds(current_exchange().seconds),
            "load_duration": nanoseconds(loading),
            "prompt_eval_count": sum(lengths),
        }
        return await vectors_response(
            lambda: head | {"embeddings": [list(shortened(vector, body.dimensions)) for vector in vectors]},
            vectors,
        )

    @blueprint.post("/api/embeddings")
    async def embed_one() -> Response:
        """The older form, for one text."""
        body = await read_body(ollama_schema.OllamaEmbeddingsBody, limit)
        worker, _ = await _leased(services, body.model)
        _, (vector,) = await embeddings.embed(services, worker, [body.prompt], truncate=True)
        return json_response({"embedding": list(vector)})

    @blueprint.get("/api/version")
    async def version() -> Response:
        return json_response({"version": package_version()})

    return blueprint


def chat_body(data: Mapping[str, Any]) -> tuple[ollama_schema.OllamaChatBody, Asked | None]:
    """What the client sent, and what that asks for if it asks for an answer. Raises RequestError."""
    asked = validate(ollama_schema.OllamaChatBody, data)
    return asked, _asked(asked) if asked.messages else None


def generate_body(data: Mapping[str, Any]) -> tuple[ollama_schema.OllamaGenerateBody, Asked | None]:
    """The same. Raises RequestError."""
    asked = validate(ollama_schema.OllamaGenerateBody, data)
    return asked, _asked(asked, raw=bool(asked.raw)) if asked.prompt else None


def _asked(asked: ollama_schema.OllamaGeneratingBody, *, raw: bool = False) -> Asked:
    body = validate(ChatBody, asked.as_openai())
    wish = Wishes(plain=True) if raw else wishes(body)
    return body.model_copy(update={"stop": asked.stop}), replace(wish, grammar=asked.text_grammar)


async def _leased(services: Services, name: str) -> tuple[Worker, float]:
    """The worker, and how many seconds it took to get it: mostly those of loading the model."""
    began = current_exchange().seconds
    worker = await lease(services, known_name(services.registry, name))
    return worker, current_exchange().seconds - began


async def _load(services: Services, name: str, said: Json) -> Response:
    """A request without a prompt only loads the model."""
    await _leased(services, name)
    head = {"model": name, "created_at": timestamp(datetime.now(UTC))}
    return json_response(head | said | {"done": True, "done_reason": "load"})


async def _answer(renderer: OllamaRenderer, runs: Sequence[Run], *, stream: bool) -> Response:
    if stream:
        return line_response(renderer, Events(runs))
    return await respond(renderer, runs, stream=False, heartbeat=0)
