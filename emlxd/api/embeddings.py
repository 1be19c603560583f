"""POST /v1/embeddings."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from quart import Blueprint, Response

from emlxd.api.fields import read_body
from emlxd.api.generate import count_prompts, lease
from emlxd.api.json_values import Json, json_bytes
from emlxd.api.offload import LARGE_ARRAY, dump_in_parts, offload
from emlxd.api.prompts import Prompt, text_prompt
from emlxd.api.schema import EmbeddingsBody
from emlxd.api.surface import Embedder, Services, Worker
from emlxd.errors import RequestError

Vector = Sequence[float]


def routes(services: Services) -> Blueprint:
    blueprint = Blueprint("embeddings", __name__)

    @blueprint.post("/v1/embeddings")
    async def create_embeddings() -> Response:
        body = await read_body(EmbeddingsBody, services.settings.server.max_body_bytes)
        worker = await lease(services, body.model)
        lengths, vectors = await embed(
            services, worker, body.input, kind=body.prompt_name, truncate=bool(body.truncate)
        )
        usage = {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
        head = {"object": "list", "model": worker.name, "usage": usage}
        show = partial(embedding_objects, vectors, body)
        return await vectors_response(lambda: head | {"data": show()}, vectors)

    return blueprint


async def embed(
    services: Services,
    worker: Worker,
    texts: Sequence[str | Sequence[int]],
    *,
    kind: str | None = None,
    truncate: bool,
) -> tuple[list[int], Sequence[Vector]]:
    """How many tokens each of ``texts`` has, and its vector. ``kind`` names the prompt that goes before it.

    Raises RequestError for a model that makes no embeddings, and as ``read_texts`` does.
    """
    if not isinstance(worker, Embedder):
        raise RequestError(f"The model '{worker.name}' does not make embeddings.", param="model")
    prompts = await read_texts(worker, texts, "input", start=worker.prompt(kind), truncate=truncate)
    vectors = await worker.embed([prompt.tokens for prompt in prompts])
    lengths = [len(prompt.tokens) for prompt in prompts]
    count_prompts(services, lengths)
    return lengths, vectors


async def vectors_response(show: Callable[[], Json], vectors: Sequence[Vector]) -> Response:
    """What ``show`` makes of ``vectors``."""
    large = sum(map(len, vectors)) > LARGE_ARRAY
    return json_bytes(await offload(lambda: dump_in_parts(show()), large=large))


def embedding_objects(vectors: Sequence[Vector], body: EmbeddingsBody) -> list[Json]:
    shown = base64_vector if body.encoding_format == "base64" else list
    return [
        {"object": "embedding", "index": index, "embedding": shown(shortened(vector, body.dimensions))}
        for index, vector in enumerate(vectors)
    ]


async def read_texts(
    worker: Worker, texts: Sequence[str | Sequence[int]], param: str, *, start: str = "", truncate: bool
) -> list[Prompt]:
    """Each of ``texts`` with ``start`` before it; token ids are taken as they are.

    Raises RequestError for a text that is empty or, unless it may be cut, too long.
    """
    prompts = []
    for text in texts:
        if not text:
            raise RequestError("An input is empty.", param=param, code="invalid_value")
        prompt = await text_prompt(worker, start + text if isinstance(text, str) else text, param=param)
        if truncate:
            cut = worker.tokenizer.truncate(prompt.tokens, worker.info.max_context)
            prompt = replace(prompt, tokens=cut)
        check_length(worker, prompt)
        prompts.append(prompt)
    return prompts


def check_length(worker: Worker, prompt: Prompt) -> None:
    """Raises RequestError for an input that is empty or does not fit."""
    if not prompt.tokens:
        raise RequestError("An input is empty.", param=prompt.param, code="invalid_value")
    if len(prompt.tokens) > worker.info.max_context:
        raise RequestError(
            f"This model's maximum context length is {worker.info.max_context} tokens, "
            f"but an input has {len(prompt.tokens)} tokens.",
            param=prompt.param,
            code="context_length_exceeded",
        )


def shortened(vector: Vector, dimensions: int | None) -> Vector:
    """The first ``dimensions`` of ``vector``, again of length 1."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        raise RequestError(
            f"Invalid value for 'dimensions': this model's embeddings have {len(vector)}.",
            param="dimensions",
            code="invalid_value",
        )
    head = vector[:dimensions]
    length = math.hypot(*head)
    return [value / length for value in head] if length else head


def base64_vector(vector: Vector) -> str:
    """Little-endian float32, which both of OpenAI's clients ask for unless told otherwise."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
