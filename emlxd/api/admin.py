"""/admin: what an operator may see and do. ``api.access`` lets in this machine, or who has a key."""

from __future__ import annotations

from quart import Blueprint, Response, request

from emlxd.api.json_values import json_response
from emlxd.api.surface import Operator, Services
from emlxd.errors import RequestError, UserError


def routes(services: Services, operator: Operator) -> Blueprint:
    blueprint = Blueprint("admin", __name__)

    @blueprint.get("/admin/status")
    async def status() -> Response:
        return json_response(operator.status() | {"draining": services.drain.started})

    @blueprint.get("/admin/config")
    async def config() -> Response:
        """The settings in force, secrets as asterisks."""
        return json_response(operator.config())

    @blueprint.post("/admin/reload")
    async def reload() -> Response:
        """Answers when all is done: new models are loaded, or the old configuration stays."""
        services.drain.check()
        dry_run = _flag("dry_run")
        try:
            plan = await operator.reload(dry_run=dry_run)
        except UserError as error:  # the file or a model's files are at fault, not the server
            raise RequestError(error.message, code="configuration_refused") from None
        return json_response({"dry_run": dry_run, "plan": plan})

    @blueprint.post("/admin/models/<path:name>/load")
    async def load(name: str) -> Response:
        services.drain.check()
        await operator.load(name)
        return json_response({"model": name, "state": "loaded"})

    @blueprint.post("/admin/models/<path:name>/unload")
    async def unload(name: str) -> Response:
        operator.unload(name)
        return json_response({"model": name, "state": "unloaded"})

    return blueprint


def _flag(name: str) -> bool:
    value = request.args.get(name, "false")
    if value not in ("true", "false"):
        raise RequestError(f"'{name}' is '{value}', expected true or false.", param=name)
    return value == "true"
