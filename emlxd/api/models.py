"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from quart import Blueprint, Response

from emlxd.api.json_values import json_response
from emlxd.api.surface import ModelEntry, Registry, Services
from emlxd.errors import ModelNotFound


def routes(services: Services) -> Blueprint:
    blueprint = Blueprint("models", __name__)

    @blueprint.get("/v1/models")
    async def list_models() -> Response:
        await services.registry.cards()
        return json_response({"object": "list", "data": list(model_objects(services.registry).values())})

    @blueprint.get("/v1/models/<path:model>")
    async def retrieve_model(model: str) -> Response:
        await services.registry.cards()
        found = model_objects(services.registry).get(model)
        if found is None:
            raise ModelNotFound(model)
        return json_response(found)

    return blueprint


def model_objects(registry: Registry) -> dict[str, dict[str, Any]]:
    """Every name that ``model`` may have in a request, with its object."""
    return {name: model_object(name, entry) for entry in registry.models for name in names_of(entry)}


def names_of(entry: ModelEntry) -> tuple[str, ...]:
    """The model's name, its aliases, and its names with an adapter."""
    return (entry.name, *entry.aliases, *entry.adapters)


def model_object(name: str, entry: ModelEntry) -> dict[str, Any]:
    """OpenAI's, and besides a ``kind`` if it does not chat, and the ``parent`` of one with an adapter."""
    shown = {"id": name, "object": "model", "created": entry.created, "owned_by": "emlxd"}
    if entry.kind not in ("chat", None):
        shown["kind"] = entry.kind
    return shown | ({"parent": entry.name} if name in entry.adapters else {})
