"""POST /v1/responses, and what was kept of it: GET and DELETE /v1/responses/{id}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quart import Blueprint, Response

from emlxd.api.body import read_checked
from emlxd.api.exchange import current_exchange
from emlxd.api.fields import Body, validate
from emlxd.api.generate import lease, sampling_params, submit
from emlxd.api.json_values import Json, json_response
from emlxd.api.offload import LARGE_COUNT, offload
from emlxd.api.prompts import Prompt, shaped, told_of
from emlxd.api.respond import respond
from emlxd.api.response_store import ResponseStore
from emlxd.api.responses_render import Keep, ResponseRenderer
from emlxd.api.responses_schema import ITEMS, Item, ResponsesBody, template_messages
from emlxd.api.shapes import wishes
from emlxd.api.surface import Services, Worker
from emlxd.errors import RequestError, ResponseNotFound
from emlxd.text.dialect import Wishes


def routes(services: Services) -> Blueprint:
    blueprint = Blueprint("responses", __name__)
    server = services.settings.server
    store = services.responses

    @blueprint.post("/v1/responses")
    async def create_response() -> Response:
        body, asked = await read_checked(responses_body, server.max_body_bytes)
        worker = await lease(services, body.model)
        items = [*_earlier_items(store, body), *body.input]
        messages = await offload(
            lambda: template_messages(body.instructions, items), large=len(items) > LARGE_COUNT
        )
        with told_of("input"):
            tokens = await worker.encode_chat(
                messages, tools=body.calling.for_template, **body.thinking_variables
            )
        prompt = await shaped(worker, Prompt(tokens, "input"), asked)
        runs = submit(services, worker, [prompt], body)
        renderer = ResponseRenderer(
            current_exchange().id.removeprefix("req_"),
            response_head(worker, body),
            None if body.likeliest is None else worker.tokenizer,
            None if body.store is False else _keep_in(store, items),
        )
        return await respond(renderer, runs, stream=bool(body.stream), heartbeat=server.heartbeat, named=True)

    @blueprint.get("/v1/responses/<id>")
    async def retrieve_response(id: str) -> Response:
        return json_response(store.get(current_exchange().owner, id).response)

    @blueprint.delete("/v1/responses/<id>")
    async def delete_response(id: str) -> Response:
        store.delete(current_exchange().owner, id)
        return json_response({"id": id, "object": "response", "deleted": True})

    return blueprint


def responses_body(data: Mapping[str, Any]) -> tuple[ResponsesBody, Wishes]:
    """Raises RequestError."""
    body = validate(ResponsesBody, data)
    return body, wishes(body)


def response_head(worker: Worker, body: ResponsesBody) -> Json:
    """What a response repeats of its request, with the values that defaults came to."""
    sampling = sampling_params(worker.info, body)
    return {
        "model": worker.name,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "text": _shown(body.text) or {"format": {"type": "text"}},
        "reasoning": _shown(body.reasoning) or {"effort": None, "summary": None},
        "tools": [_shown(tool) | {"strict": bool(tool.strict)} for tool in body.tools or []],
        "tool_choice": _shown_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "truncation": "disabled",
        "background": False,
    }


def _shown(value: Body | None) -> Any:
    """What the client wrote."""
    return None if value is None else value.model_dump(by_alias=True, exclude_unset=True)


def _shown_choice(choice: str | list[str] | None) -> Json | str:
    return {"type": "function", "name": choice[0]} if isinstance(choice, list) else choice or "auto"


def _earlier_items(store: ResponseStore, body: ResponsesBody) -> Sequence[Item]:
    """The conversation that the request goes on with. Raises RequestError if it was not kept."""
    if body.previous_response_id is None:
        return []
    try:
        return store.get(current_exchange().owner, body.previous_response_id).items
    except ResponseNotFound as error:
        raise RequestError(
            error.message, param="previous_response_id", code="previous_response_not_found"
        ) from None


def _keep_in(store: ResponseStore, items: Sequence[Item]) -> Keep:
    owner = current_exchange().owner

    def keep(response: Json) -> None:
        store.keep(owner, response, [*items, *ITEMS.validate_python(response["output"])])

    return keep
