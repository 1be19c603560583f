"""What a request's span says, by OpenTelemetry's conventions for generative AI and for HTTP."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from emlxd.api.exchange import Exchange
from emlxd.tracing import Tracer, Value

OPERATIONS: Final = MappingProxyType(
    {
        "/v1/chat/completions": "chat",
        "/v1/responses": "chat",
        "/v1/messages": "chat",
        "/api/chat": "chat",
        "/v1/completions": "text_completion",
        "/api/generate": "text_completion",
        "/v1/embeddings": "embeddings",
        "/api/embed": "embeddings",
        "/api/embeddings": "embeddings",
        "/v1/rerank": "rerank",
    }
)


def record_span(tracer: Tracer, exchange: Exchange, status: int) -> None:
    """A span for an exchange that is over, if it was one with a model."""
    operation = OPERATIONS.get(exchange.route)
    if operation is None or exchange.method != "POST":
        return
    tally = exchange.tally
    failed = status >= 500 or "error" in tally.finish_reasons
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "emlxd",
        "http.request.method": exchange.method,
        "http.route": exchange.route,
        "http.response.status_code": status,
        "client.address": exchange.client,
        "emlxd.request_id": exchange.request_id,
    }
    if tally.model:
        attributes |= _model(exchange)
    if failed or status >= 400:
        attributes["error.type"] = str(status) if status >= 400 else "error"
    name = f"{operation} {tally.model}".rstrip()
    tracer.record(name, attributes, seconds=exchange.seconds, parent=exchange.traceparent, failed=failed)


def _model(exchange: Exchange) -> dict[str, Value]:
    tally = exchange.tally
    attributes: dict[str, Value] = {
        "gen_ai.request.model": tally.model,
        "gen_ai.response.model": tally.model,
        "gen_ai.response.finish_reasons": tally.finish_reasons,
        "gen_ai.usage.input_tokens": tally.prompt_tokens,
        "gen_ai.usage.output_tokens": tally.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": tally.cached_tokens,
    }
    if tally.first_token is not None:
        attributes["gen_ai.latency.time_to_first_token"] = tally.first_token
    if asked := tally.asked:
        attributes |= {
            "gen_ai.request.max_tokens": asked.max_tokens,
            "gen_ai.request.choice.count": asked.n,
            "gen_ai.request.temperature": asked.sampling.temperature,
            "gen_ai.request.top_p": asked.sampling.top_p,
            "gen_ai.request.top_k": asked.sampling.top_k,
        }
        if asked.sampling.seed is not None:
            attributes["gen_ai.request.seed"] = asked.sampling.seed
    return attributes
