"""Ollama's /api/tags, ps and show: the models of config.yaml, and what their files say of them."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from quart import Blueprint, Response

from emlxd.api import ollama_schema
from emlxd.api.fields import read_body
from emlxd.api.json_values import Json, json_response
from emlxd.api.models import names_of
from emlxd.api.ollama_render import timestamp
from emlxd.api.surface import ModelEntry, Registry, Services
from emlxd.core import ModelCard
from emlxd.errors import ModelNotFound

LATEST: Final = ":latest"  # what a name without a tag means to Ollama; clients add it, or leave it out
NEVER: Final = datetime(9999, 12, 31, tzinfo=UTC)
CAPABILITIES: Final = {"chat": "completion", "embedding": "embedding", "rerank": "rerank"}


def routes(services: Services) -> Blueprint:
    blueprint = Blueprint("ollama_models", __name__)
    registry = services.registry

    @blueprint.get("/api/tags")
    async def tags() -> Response:
        cards = await registry.cards()
        found = [
            tag_object(name, entry, card) | {"size": card.nbytes if card else 0}
            for name, entry in _named(registry)
            for card in [cards.get(entry.name)]
        ]
        return json_response({"models": found})

    @blueprint.get("/api/ps")
    async def loaded() -> Response:
        cards = await registry.cards()
        on_gpu = services.metrics.device != "cpu"
        entries = [entry for entry in registry.models if entry.state == "loaded"]
        return json_response(
            {"models": [loaded_object(entry, cards.get(entry.name), on_gpu=on_gpu) for entry in entries]}
        )

    @blueprint.post("/api/show")
    async def show() -> Response:
        body = await read_body(ollama_schema.OllamaBody, services.settings.server.max_body_bytes)
        name = known_name(registry, body.model)
        entry = dict(_named(registry))[name]
        return json_response(show_object(name, entry, (await registry.cards()).get(entry.name)))

    return blueprint


def known_name(registry: Registry, name: str) -> str:
    """The name as the registry has it: this very one, or else the one that ``LATEST`` makes equal to it.

    Raises ModelNotFound.
    """
    names = {known for known, _ in _named(registry)}
    for candidate in (name, name.removesuffix(LATEST), name + LATEST):
        if candidate in names:
            return candidate
    raise ModelNotFound(name)


def tag_object(name: str, entry: ModelEntry, card: ModelCard | None) -> Json:
    """Of a model whose files are not here only the name is known, and its digest is that of the name."""
    own = name if name in entry.adapters else ""
    digest = hashlib.sha256(entry.name.encode()).hexdigest() if card is None else card.digest
    if own:
        digest = hashlib.sha256(f"{digest} {own}".encode()).hexdigest()
    return {"name": name, "model": name, "digest": digest} | _about(name, entry, card)


def loaded_object(entry: ModelEntry, card: ModelCard | None, *, on_gpu: bool) -> Json:
    """``size`` is what the model takes of memory, K/V cache and all."""
    left = entry.seconds_left(time.monotonic())
    expires = NEVER if math.isinf(left) else datetime.now(UTC) + timedelta(seconds=left)
    return tag_object(entry.name, entry, card) | {
        "size": entry.nbytes,
        "size_vram": entry.nbytes if on_gpu else 0,
        "context_length": card.max_context if card else 0,
        "expires_at": timestamp(expires),
    }


def show_object(name: str, entry: ModelEntry, card: ModelCard | None) -> Json:
    about = _about(name, entry, card)
    if card is None:
        return about | {"capabilities": [], "model_info": {}}
    chats = card.kind == "chat"
    return about | {
        "template": card.template,
        "capabilities": [
            CAPABILITIES[card.kind],
            *(["tools"] if chats and card.template else []),
            *(["thinking"] if chats and card.thinks else []),
        ],
        "model_info": {
            "general.architecture": card.architecture,
            "general.parameter_count": card.parameters,
            f"{card.architecture}.context_length": card.max_context,
        },
    }


def _about(name: str, entry: ModelEntry, card: ModelCard | None) -> Json:
    family = card.architecture if card else ""
    details = {
        "parent_model": entry.name if name in entry.adapters else "",
        "format": card.format if card else "",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _short_count(card.parameters) if card else "",
        "quantization_level": card.quantization if card else "",
    }
    modified = card.modified if card else entry.created
    return {"modified_at": timestamp(datetime.fromtimestamp(modified, UTC)), "details": details}


def _short_count(parameters: int) -> str:
    """As Ollama writes it: 134.52M, 8.0B."""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M"


def _named(registry: Registry) -> Iterator[tuple[str, ModelEntry]]:
    for entry in registry.models:
        for name in names_of(entry):
            yield name, entry
