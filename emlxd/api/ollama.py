"""Ollama's /api/chat, generate, embed, tags, ps, show and version, for clients that know no other API.

Models are those of config.yaml, with weights and contexts as they are there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from quart import Blueprint, Response

from emlxd.api import ollama_schema
from emlxd.api.body import read_object
from emlxd.api.embeddings import read_texts, shortened
from emlxd.api.exchange import current_exchange
from emlxd.api.fields import validate
from emlxd.api.generate import Events, Run, count_prompts, lease, submit
from emlxd.api.logprobs import Json
from emlxd.api.models import names_of
from emlxd.api.ollama_render import ChatRenderer, GenerateRenderer, OllamaRenderer, nanoseconds, timestamp
from emlxd.api.prompts import chat_prompt, shaped, text_prompt
from emlxd.api.render import json_response
from emlxd.api.respond import respond
from emlxd.api.schema import ChatBody
from emlxd.api.shapes import wishes
from emlxd.api.sse import line_response
from emlxd.api.surface import Embedder, ModelEntry, Registry, Services, Worker
from emlxd.errors import ModelNotFound, RequestError
from emlxd.metrics import package_version
from emlxd.text.dialect import Wishes

LATEST = ":latest"  # clients add it to a name without a tag


def routes(services: Services) -> Blueprint:
    blueprint = Blueprint("ollama", __name__)
    limit = services.settings.server.max_body_bytes
    registry = services.registry

    @blueprint.post("/api/chat")
    async def chat() -> Response:
        asked = validate(ollama_schema.OllamaChatBody, await read_object(limit))
        if not asked.messages:
            return await _load(services, asked.model, {"message": {"role": "assistant", "content": ""}})
        body = validate(ChatBody, asked.as_openai())
        worker, loading = await _leased(services, asked.model)
        prompt = await shaped(worker, await chat_prompt(worker, body), wishes(body, body, body))
        renderer = ChatRenderer(current_exchange(), asked.model, loading)
        return await _answer(renderer, submit(services, worker, [prompt], body), stream=asked.streams)

    @blueprint.post("/api/generate")
    async def generate() -> Response:
        asked = validate(ollama_schema.OllamaGenerateBody, await read_object(limit))
        if not asked.prompt:
            return await _load(services, asked.model, {"response": ""})
        body = validate(ChatBody, asked.as_openai())
        worker, loading = await _leased(services, asked.model)
        if asked.raw:
            wish = Wishes(grammar=body.text_grammar, plain=True)
            prompt = await shaped(worker, await text_prompt(worker, asked.prompt), wish)
        else:
            prompt = await shaped(worker, await chat_prompt(worker, body), wishes(body, body, body))
        renderer = GenerateRenderer(current_exchange(), asked.model, loading)
        return await _answer(renderer, submit(services, worker, [prompt], body), stream=asked.streams)

    @blueprint.post("/api/embed")
    async def embed() -> Response:
        body = validate(ollama_schema.OllamaEmbedBody, await read_object(limit))
        worker, loading = await _leased(services, body.model)
        if not isinstance(worker, Embedder):
            raise RequestError(f"The model '{worker.name}' does not make embeddings.", param="model")
        start, truncate = worker.prompt(None), body.truncate is not False
        prompts = await read_texts(worker, body.input, "input", start=start, truncate=truncate)
        vectors = await worker.embed([prompt.tokens for prompt in prompts])
        count_prompts(services, [len(prompt.tokens) for prompt in prompts])
        return json_response(
            {
                "model": body.model,
                "embeddings": [list(shortened(vector, body.dimensions)) for vector in vectors],
                "total_duration": nanoseconds(current_exchange().seconds),
                "load_duration": nanoseconds(loading),
                "prompt_eval_count": sum(len(prompt.tokens) for prompt in prompts),
            }
        )

    @blueprint.get("/api/tags")
    async def tags() -> Response:
        return json_response({"models": [_model(name, entry) for name, entry in _named(registry)]})

    @blueprint.get("/api/ps")
    async def loaded() -> Response:
        found = [_model(entry.name, entry) for entry in registry.models if entry.state == "loaded"]
        return json_response({"models": found})

    @blueprint.post("/api/show")
    async def show() -> Response:
        name = validate(ollama_schema.OllamaBody, await read_object(limit)).model
        known = _known(registry, name)
        entry = dict(_named(registry))[known]
        if entry.state != "loaded":  # what a model is, only its files know
            return json_response(_about(known, entry) | {"capabilities": [], "model_info": {}})
        worker, _ = await _leased(services, name)
        return json_response(_about(known, entry, worker.info.architecture) | _abilities(worker))

    @blueprint.get("/api/version")
    async def version() -> Response:
        return json_response({"version": package_version()})

    return blueprint


async def _leased(services: Services, name: str) -> tuple[Worker, float]:
    """The worker, and how many seconds it took to be there."""
    began = current_exchange().seconds
    worker = await lease(services, _known(services.registry, name))
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


def _named(registry: Registry) -> Iterator[tuple[str, ModelEntry]]:
    for entry in registry.models:
        for name in names_of(entry):
            yield name, entry


def _known(registry: Registry, name: str) -> str:
    """The name as the registry has it. Raises ModelNotFound."""
    names = {known for known, _ in _named(registry)}
    for candidate in (name, name.removesuffix(LATEST)):
        if candidate in names:
            return candidate
    raise ModelNotFound(name)


def _model(name: str, entry: ModelEntry) -> Json:
    """The digest is the name's: files are not read for a list. Their size is not known here, so it is 0."""
    own = name if name in entry.adapters else entry.name
    digest = hashlib.sha256(own.encode()).hexdigest()
    return {"name": name, "model": name, "size": 0, "digest": digest} | _about(name, entry)


def _about(name: str, entry: ModelEntry, family: str = "") -> Json:
    details = {
        "parent_model": entry.name if name in entry.adapters else "",
        "format": "mlx",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": "",
    }
    return {"modified_at": timestamp(datetime.fromtimestamp(entry.created, UTC)), "details": details}


def _abilities(worker: Worker) -> Json:
    architecture = worker.info.architecture
    return {
        "capabilities": ["embedding" if isinstance(worker, Embedder) else "completion"],
        "model_info": {
            "general.architecture": architecture,
            f"{architecture}.context_length": worker.info.max_context,
            f"{architecture}.vocab_size": worker.info.vocab_size,
        },
    }
