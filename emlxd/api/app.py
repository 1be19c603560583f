"""The Quart app: its routes, and each default of Quart's that a long stream or an API client minds."""

from __future__ import annotations

from functools import partial

from quart import Quart, Response, request
from werkzeug.exceptions import MethodNotAllowed

from emlxd.api import (
    access,
    admin,
    chat,
    completions,
    embeddings,
    errors,
    health,
    messages,
    models,
    ollama,
    ollama_models,
    openapi,
    page,
    rerank,
    responses,
    running,
    tokenization,
)
from emlxd.api.drain import Drain
from emlxd.api.exchange import ExchangeMiddleware, current_exchange
from emlxd.api.json_values import no_content
from emlxd.api.response_store import ResponseStore
from emlxd.api.span import record_span
from emlxd.api.surface import Operator, Registry, Services
from emlxd.config import Settings
from emlxd.metrics import Metrics
from emlxd.tracing import Tracer

# A route family is a module with ``routes(services) -> Blueprint`` and a row here.
FAMILIES = (
    chat,
    completions,
    responses,
    messages,
    embeddings,
    rerank,
    tokenization,
    models,
    ollama,
    ollama_models,
    health,
    running,
    openapi,
    page,
)


def create_app(
    registry: Registry,
    settings: Settings,
    metrics: Metrics,
    drain: Drain | None = None,
    operator: Operator | None = None,
    tracer: Tracer | None = None,
    responses: ResponseStore | None = None,
) -> Quart:
    """``drain`` is given by who wants to end the server gracefully, ``operator`` by who has /admin.

    ``responses`` are those that were kept, by who goes on with them in another app.

    Raises UserError if the file of keys cannot be read.
    """
    services = Services(registry, settings, metrics, drain or Drain(), responses or ResponseStore())
    app = Quart("emlxd", static_folder=None)
    app.config.update(
        RESPONSE_TIMEOUT=None,  # a stream takes as long as it takes
        BODY_TIMEOUT=None,  # api.body has its own, which also covers reading in parts
        MAX_CONTENT_LENGTH=None,  # api.body keeps the limit: it swallows the rest and answers in our shape
        PROPAGATE_EXCEPTIONS=False,  # also under a debugger: a client gets JSON, never a traceback
        PROVIDE_AUTOMATIC_OPTIONS=False,  # its answer is typed text/html
    )
    app.url_map.strict_slashes = False  # /v1/models/ is /v1/models: a redirect would be HTML and lose bodies
    app.url_map.merge_slashes = False  # and so would the one from //v1/models
    for family in FAMILIES:
        app.register_blueprint(family.routes(services))
    if operator is not None:
        app.register_blueprint(admin.routes(services, operator))
    app.before_request(_note_route)
    access.install(app, settings)
    app.before_request(_answer_options)
    errors.install(app)
    ended = partial(record_span, tracer) if tracer else None
    app.asgi_app = ExchangeMiddleware(app.asgi_app, metrics, ended)  # type: ignore[method-assign]
    return app


async def _note_route() -> None:
    if request.url_rule is not None:
        current_exchange().route = request.url_rule.rule


async def _answer_options() -> Response | None:
    """OPTIONS on a path that exists: which methods it has."""
    refused = request.routing_exception
    if request.method != "OPTIONS" or not isinstance(refused, MethodNotAllowed):
        return None
    methods = sorted({*(refused.valid_methods or ()), "OPTIONS"})
    return no_content({"Allow": ", ".join(methods)})
