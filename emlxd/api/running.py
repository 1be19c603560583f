"""GET /admin/requests and POST /admin/requests/{id}/abort: what runs now, and how to end it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from quart import Blueprint, Response

from emlxd.api.drain import Running
from emlxd.api.json_values import json_response
from emlxd.api.surface import Services


def routes(services: Services) -> Blueprint:
    blueprint = Blueprint("running", __name__)

    @blueprint.get("/admin/requests")
    async def list_requests() -> Response:
        by_request = groupby(services.drain.running, key=lambda one: one.generation_id)
        return json_response({"requests": [request_object(list(group)) for _, group in by_request]})

    @blueprint.post("/admin/requests/<id>/abort")
    async def abort_request(id: str) -> Response:
        services.drain.abort(id)
        return json_response({"id": id, "aborted": True})

    return blueprint


def request_object(generations: Sequence[Running]) -> dict[str, Any]:
    """One HTTP request with all that it generates. ``unread_bytes`` waits for a slow client."""
    first = generations[0]
    requests = [one.generation.request for one in generations]
    return {
        "id": first.generation_id,
        "model": first.model,
        "endpoint": first.route,
        "seconds": round(time.monotonic() - first.started, 3),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "answers": sum(request.n for request in requests),
        "unread_bytes": sum(one.generation.unread for one in generations),
    }
