"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

from quart import Blueprint, Response

from emlxd.api.body import read_object
from emlxd.api.fields import validate
from emlxd.api.generate import lease
from emlxd.api.json_values import json_response
from emlxd.api.logprobs import token_name
from emlxd.api.prompts import chat_prompt, check_tokens
from emlxd.api.schema import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from emlxd.api.surface import Services
from emlxd.errors import RequestError


def routes(services: Services) -> Blueprint:
    blueprint = Blueprint("tokenization", __name__)
    max_bytes = services.settings.server.max_body_bytes

    @blueprint.post("/tokenize")
    async def tokenize() -> Response:
        body = tokenize_body(await read_object(max_bytes))
        worker = await lease(services, body.model)
        if isinstance(body, TokenizeChatBody):
            tokens = list((await chat_prompt(worker, body)).tokens)
        else:
            special = body.add_special_tokens is not False
            tokens = await worker.encode(body.prompt, add_special_tokens=special)
        names = [token_name(worker.tokenizer, token) for token in tokens] if body.return_token_strs else None
        return json_response(
            {
                "count": len(tokens),
                "max_model_len": worker.info.max_context,
                "tokens": tokens,
                "token_strs": names,
            }
        )

    @blueprint.post("/detokenize")
    async def detokenize() -> Response:
        """Special tokens are written out, so that this undoes /tokenize."""
        body = validate(DetokenizeBody, await read_object(max_bytes))
        worker = await lease(services, body.model)
        check_tokens(worker, body.tokens, "tokens")
        return json_response({"prompt": worker.tokenizer.decode(body.tokens, skip_special_tokens=False)})

    return blueprint


def tokenize_body(data: dict[str, Any]) -> TokenizeTextBody | TokenizeChatBody:
    """A text or a conversation. Raises RequestError for both at once."""
    if data.get("messages") is None:
        return validate(TokenizeTextBody, data)
    if data.get("prompt") is not None:
        raise RequestError("Expected 'prompt' or 'messages', not both.", param="prompt", code="invalid_value")
    return validate(TokenizeChatBody, data)
