"""GET /health, /ready and /metrics: what supervisors and scrapers ask."""

from __future__ import annotations

from quart import Blueprint, Response, request

from emlxd.api.json_values import json_response
from emlxd.api.surface import Services
from emlxd.errors import Unavailable


def routes(services: Services) -> Blueprint:
    blueprint = Blueprint("health", __name__)

    @blueprint.get("/health")
    async def health() -> Response:
        """The event loop runs. Says nothing about models."""
        return json_response({"status": "ok"})

    @blueprint.get("/ready")
    async def ready() -> Response:
        services.drain.check()
        states = {entry.name: entry.state for entry in services.registry.models}
        if not services.registry.ready:
            listed = ", ".join(f"{name} is {state}" for name, state in states.items())
            raise Unavailable(f"Not every model answers: {listed or 'none is known'}.")
        return json_response({"status": "ready", "models": states})

    if services.settings.metrics.enabled:

        @blueprint.get("/metrics")
        async def metrics() -> Response:
            text, content_type = services.metrics.exposition(
                request.headers.get("Accept", ""), vllm_names=services.settings.metrics.vllm_names
            )
            return Response(text, content_type=content_type)

    return blueprint
