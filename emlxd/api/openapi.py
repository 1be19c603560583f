"""GET /openapi.json: every route for programs, with its bodies from the models that check them.

The table of operations is kept by hand; a test holds it to the routes of the app, and schemathesis
holds the answers to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import orjson
from pydantic.json_schema import models_json_schema
from quart import Blueprint, Response

from emlxd.api import messages_schema, ollama_schema, responses_schema, schema
from emlxd.api.fields import Body
from emlxd.api.json_values import Json
from emlxd.api.surface import Services
from emlxd.version import package_version

EVENTS: Final = "text/event-stream"
LINES: Final = "application/x-ndjson"
REFERENCE: Final = "#/components/schemas/{model}"


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _with_optional(described: Json, **properties: Json) -> Json:
    return described | {"properties": described["properties"] | properties}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _nullable(value: Json) -> Json:
    return {"anyOf": [value, {"type": "null"}]}


def _const(value: str) -> Json:
    return {"type": "string", "const": value}


TEXT: Final[Json] = {"type": "string"}
COUNT: Final[Json] = {"type": "integer", "minimum": 0}
FLAG: Final[Json] = {"type": "boolean"}
ANY_OBJECT: Final[Json] = {"type": "object"}

ERROR: Final = _object(
    error=_object(message=TEXT, type=TEXT, param=_nullable(TEXT), code=_nullable(TEXT)),
)
ANTHROPIC_ERROR: Final = _object(type=_const("error"), error=_object(type=TEXT, message=TEXT))
OLLAMA_ERROR: Final = _object(error=TEXT)
USAGE: Final = _object(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
ENVELOPE: Final[Json] = {"id": TEXT, "created": COUNT, "model": TEXT, "usage": USAGE}
CHAT_MESSAGE: Final = _object(role=_const("assistant"), content=_nullable(TEXT), refusal=_nullable(TEXT))
CHOICE: Final[Json] = {"index": COUNT, "finish_reason": TEXT, "logprobs": _nullable(ANY_OBJECT)}
CHAT: Final = _object(
    **ENVELOPE, object=_const("chat.completion"), choices=_list(_object(**CHOICE, message=CHAT_MESSAGE))
)
COMPLETION: Final = _object(
    **ENVELOPE, object=_const("text_completion"), choices=_list(_object(**CHOICE, text=TEXT))
)
RESPONSE: Final = _object(
    id=TEXT,
    object=_const("response"),
    created_at=COUNT,
    status=TEXT,
    model=TEXT,
    output=_list(_object(id=TEXT, type=TEXT, status=TEXT)),
    usage=_object(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT),
)
MESSAGE: Final = _object(
    id=TEXT,
    type=_const("message"),
    role=_const("assistant"),
    model=TEXT,
    content=_list(_object(type=TEXT)),
    stop_reason=TEXT,
    stop_sequence=_nullable(TEXT),
    usage=_object(input_tokens=COUNT, output_tokens=COUNT),
)
EMBEDDINGS: Final = _object(
    object=_const("list"),
    model=TEXT,
    data=_list(
        _object(
            object=_const("embedding"),
            index=COUNT,
            embedding={"anyOf": [_list({"type": "number"}), TEXT]},
        )
    ),
    usage=_object(prompt_tokens=COUNT, total_tokens=COUNT),
)
RERANKED: Final = _object(
    id=TEXT,
    model=TEXT,
    results=_list(_object(index=COUNT, relevance_score={"type": "number"})),
    usage=_object(prompt_tokens=COUNT, total_tokens=COUNT),
)
TOKENS: Final = _object(
    count=COUNT, max_model_len=COUNT, tokens=_list(COUNT), token_strs=_nullable(_list(TEXT))
)
MODEL: Final = _with_optional(
    _object(id=TEXT, object=_const("model"), created=COUNT, owned_by=TEXT), parent=TEXT
)
RUNNING: Final = _object(
    id=TEXT,
    model=TEXT,
    endpoint=TEXT,
    seconds={"type": "number"},
    prompt_tokens=COUNT,
    answers=COUNT,
    unread_bytes=COUNT,
)

OLLAMA_END: Final[Json] = {"model": TEXT, "created_at": TEXT, "done": {"const": True}, "done_reason": TEXT}
OLLAMA_DETAILS: Final = _object(format=TEXT, family=TEXT, parameter_size=TEXT, quantization_level=TEXT)
OLLAMA_MODEL: Final[Json] = {"modified_at": TEXT, "details": OLLAMA_DETAILS}
OLLAMA_MODELS: Final = _object(
    models=_list(_object(name=TEXT, model=TEXT, size=COUNT, digest=TEXT, **OLLAMA_MODEL))
)


@dataclass(frozen=True, slots=True)
class Operation:
    """``body`` has every kind of body that is taken. ``answer`` is a schema, or a media type other than JSON.

    ``stream`` is the media type of an answer that comes in parts.
    """

    method: str
    path: str
    summary: str
    answer: Json | str
    body: tuple[type[Body], ...] = ()
    stream: str | None = None
    parameters: tuple[str, ...] = ()


OPERATIONS: Final = (
    Operation("post", "/v1/chat/completions", "Answer a conversation.", CHAT, (schema.ChatBody,), EVENTS),
    Operation("post", "/v1/completions", "Go on with a text.", COMPLETION, (schema.CompletionBody,), EVENTS),
    Operation(
        "post",
        "/v1/responses",
        "Answer in OpenAI's newer form, and keep the answer to go on from.",
        RESPONSE,
        (responses_schema.ResponsesBody,),
        EVENTS,
    ),
    Operation("get", "/v1/responses/{id}", "A response that was kept.", RESPONSE),
    Operation(
        "delete",
        "/v1/responses/{id}",
        "Forget a response.",
        _object(id=TEXT, object=_const("response"), deleted=FLAG),
    ),
    Operation(
        "post",
        "/v1/messages",
        "Answer in Anthropic's form.",
        MESSAGE,
        (messages_schema.MessagesBody,),
        EVENTS,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation in Anthropic's form.",
        _object(input_tokens=COUNT),
        (messages_schema.MessagesPrompt,),
    ),
    Operation("post", "/v1/embeddings", "Texts as vectors.", EMBEDDINGS, (schema.EmbeddingsBody,)),
    Operation("post", "/v1/rerank", "Documents by how well they answer.", RERANKED, (schema.RerankBody,)),
    Operation(
        "post",
        "/tokenize",
        "A text or a conversation in tokens.",
        TOKENS,
        (schema.TokenizeTextBody, schema.TokenizeChatBody),
    ),
    Operation("post", "/detokenize", "Tokens as text.", _object(prompt=TEXT), (schema.DetokenizeBody,)),
    Operation("get", "/v1/models", "The models.", _object(object=_const("list"), data=_list(MODEL))),
    Operation("get", "/v1/models/{model}", "One model.", MODEL),
    Operation(
        "post",
        "/api/chat",
        "Answer a conversation in Ollama's form.",
        _object(**OLLAMA_END, message=_object(role=_const("assistant"), content=TEXT)),
        (ollama_schema.OllamaChatBody,),
        LINES,
    ),
    Operation(
        "post",
        "/api/generate",
        "Answer a prompt in Ollama's form.",
        _object(**OLLAMA_END, response=TEXT),
        (ollama_schema.OllamaGenerateBody,),
        LINES,
    ),
    Operation(
        "post",
        "/api/embed",
        "Texts as vectors in Ollama's form.",
        _object(model=TEXT, embeddings=_list(_list({"type": "number"})), prompt_eval_count=COUNT),
        (ollama_schema.OllamaEmbedBody,),
    ),
    Operation(
        "post",
        "/api/embeddings",
        "A text as a vector in Ollama's older form.",
        _object(embedding=_list({"type": "number"})),
        (ollama_schema.OllamaEmbeddingsBody,),
    ),
    Operation(
        "post",
        "/api/show",
        "One model in Ollama's form.",
        _object(**OLLAMA_MODEL, capabilities=_list(TEXT), model_info=ANY_OBJECT),
        (ollama_schema.OllamaBody,),
    ),
    Operation("get", "/api/tags", "The models in Ollama's form.", OLLAMA_MODELS),
    Operation("get", "/api/ps", "The models in memory in Ollama's form.", OLLAMA_MODELS),
    Operation("get", "/api/version", "emlxd's version.", _object(version=TEXT)),
    Operation("get", "/health", "The process runs.", _object(status=_const("ok"))),
    Operation("get", "/ready", "Every model answers.", _object(status=_const("ready"), models=ANY_OBJECT)),
    Operation("get", "/metrics", "Readings for Prometheus.", "text/plain"),
    Operation("get", "/openapi.json", "This description.", _object(openapi=TEXT, paths=ANY_OBJECT)),
    Operation("get", "/admin/requests", "What runs now.", _object(requests=_list(RUNNING))),
    Operation(
        "post", "/admin/requests/{id}/abort", "End a request.", _object(id=TEXT, aborted={"const": True})
    ),
    Operation("get", "/admin/status", "The models and their memory.", ANY_OBJECT),
    Operation("get", "/admin/config", "The settings in force, without secrets.", ANY_OBJECT),
    Operation(
        "post",
        "/admin/reload",
        "Read the configuration again.",
        _object(dry_run=FLAG, plan=ANY_OBJECT),
        parameters=("dry_run",),
    ),
    Operation("post", "/admin/models/{name}/load", "Load a model.", _object(model=TEXT, state=TEXT)),
    Operation("post", "/admin/models/{name}/unload", "Unload a model.", _object(model=TEXT, state=TEXT)),
)


def routes(services: Services) -> Blueprint:
    blueprint = Blueprint("openapi", __name__)
    server = services.settings.server
    data = orjson.dumps(document(keys=bool(server.api_keys or server.api_keys_file)))

    @blueprint.get("/openapi.json")
    async def openapi() -> Response:
        return Response(data, content_type="application/json")

    return blueprint


def document(*, keys: bool) -> Json:
    """The description in OpenAPI 3.1. ``keys``: whether the server wants API keys."""
    bodies = [(body, "validation") for operation in OPERATIONS for body in operation.body]
    names, definitions = models_json_schema(bodies, ref_template=REFERENCE)  # type: ignore[arg-type]
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        schemas = [names[body, "validation"] for body in operation.body]
        paths.setdefault(operation.path, {})[operation.method] = _operation_object(operation, schemas)
    errors = {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR, "OllamaError": OLLAMA_ERROR}
    return {
        "openapi": "3.1.0",
        "info": {"title": "emlxd", "version": package_version()},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}) | errors,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"header": []}] if keys else [],
    }


def _operation_object(operation: Operation, bodies: list[Any]) -> Json:
    prefixes = {"/v1/messages": "AnthropicError", "/api/": "OllamaError"}
    error = next((name for start, name in prefixes.items() if operation.path.startswith(start)), "Error")
    refused = _content("application/json", {"$ref": REFERENCE.format(model=error)})
    described: Json = {
        "summary": operation.summary,
        "parameters": _parameters(operation),
        "responses": {
            "200": {"description": "Success.", "content": _answer(operation)},
            "4XX": {"description": "The request is at fault.", "content": refused},
            "5XX": {"description": "The server is at fault, or cannot answer now.", "content": refused},
        },
    }
    if bodies:
        body = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        described["requestBody"] = {"required": True, "content": _content("application/json", body)}
    return described


def _answer(operation: Operation) -> Json:
    if isinstance(operation.answer, str):
        return _content(operation.answer, TEXT)
    parts: Json = {operation.stream: {}} if operation.stream else {}
    return _content("application/json", operation.answer) | parts


def _parameters(operation: Operation) -> list[Json]:
    in_path = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    return [
        *({"name": name, "in": "path", "required": True, "schema": TEXT} for name in in_path),
        *({"name": name, "in": "query", "schema": FLAG} for name in operation.parameters),
    ]


def _content(media_type: str, value: Json) -> Json:
    return {media_type: {"schema": value}}
