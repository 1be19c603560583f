"""POST /v1/rerank, in the shape of Jina and Cohere: a cross-encoder's scores, or cosines of embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from quart import Blueprint, Response

from emlxd.api.embeddings import read_texts
from emlxd.api.exchange import current_exchange
from emlxd.api.fields import read_body
from emlxd.api.generate import count_prompts, lease
from emlxd.api.json_values import json_response
from emlxd.api.offload import LARGE_ARRAY, offload
from emlxd.api.schema import RerankBody
from emlxd.api.surface import Embedder, Reranker, Services
from emlxd.core import TokenizedText
from emlxd.errors import RequestError

DOCUMENT_PROMPTS = ("document", "passage")  # what models call the kind of text that is found


def routes(services: Services) -> Blueprint:
    blueprint = Blueprint("rerank", __name__)

    @blueprint.post("/v1/rerank")
    async def rerank() -> Response:
        body = await read_body(RerankBody, services.settings.server.max_body_bytes)
        worker = await lease(services, body.model)
        truncate = body.truncate is not False
        if isinstance(worker, Reranker):
            scores, lengths = await _score_pairs(worker, body.query, body.texts, truncate)
        elif isinstance(worker, Embedder):
            scores, lengths = await _compare_vectors(worker, body.query, body.texts, truncate)
        else:
            raise RequestError(f"The model '{worker.name}' does not rank documents.", param="model")
        count_prompts(services, lengths)
        best = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n]
        shows = body.return_documents is not False
        return json_response(
            {
                "id": f"rerank-{current_exchange().id}",
                "model": worker.name,
                "results": [
                    {"index": place, "relevance_score": scores[place]}
                    | ({"document": {"text": body.texts[place]}} if shows else {})
                    for place in best
                ],
                "usage": {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)},
            }
        )

    return blueprint


async def _score_pairs(
    worker: Reranker, query: str, texts: Sequence[str], truncate: bool
) -> tuple[Sequence[float], list[int]]:
    """The scores, and how many tokens were read for each."""
    pairs = [_fitting(worker, await worker.encode_pair(query, text), truncate) for text in texts]
    return await worker.score(pairs), [len(pair.tokens) for pair in pairs]


def _fitting(worker: Reranker, pair: TokenizedText, truncate: bool) -> TokenizedText:
    """The pair with its document cut if need be. Raises RequestError if that is not wanted or not enough,
    and if there is nothing to read.
    """
    limit, found = worker.info.max_context, len(pair.tokens)
    if not found:
        raise RequestError("The query and a document are empty.", param="query", code="invalid_value")
    if found <= limit:
        return pair
    if pair.second_at >= limit or not truncate:
        param = "query" if pair.second_at >= limit else "documents"
        raise RequestError(
            f"This model's maximum context length is {limit} tokens, "
            f"but the query and a document have {found} tokens.",
            param=param,
            code="context_length_exceeded",
        )
    return replace(pair, tokens=tuple(worker.tokenizer.truncate(pair.tokens, limit)))


async def _compare_vectors(
    worker: Embedder, query: str, texts: Sequence[str], truncate: bool
) -> tuple[list[float], list[int]]:
    """The cosines, and how many tokens were read for the query and for each text."""
    known = worker.prompts
    start = next((known[name] for name in DOCUMENT_PROMPTS if name in known), "")
    prompts = await read_texts(worker, [query], "query", start=known.get("query", ""), truncate=truncate)
    prompts += await read_texts(worker, texts, "documents", start=start, truncate=truncate)
    asked, *vectors = await worker.embed([prompt.tokens for prompt in prompts])
    scores = await offload(
        lambda: [_cosine(asked, vector) for vector in vectors],
        large=len(asked) * len(vectors) > LARGE_ARRAY,
    )
    return scores, [len(prompt.tokens) for prompt in prompts]


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    lengths = math.hypot(*a) * math.hypot(*b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0
