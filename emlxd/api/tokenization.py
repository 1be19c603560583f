"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import orjson
from quart import Blueprint, Response

from emlxd.api.body import read_checked
from emlxd.api.fields import read_body, validate
from emlxd.api.generate import lease
from emlxd.api.json_values import json_bytes
from emlxd.api.logprobs import token_name
from emlxd.api.offload import LARGE_ARRAY, offload
from emlxd.api.prompts import chat_prompt, check_tokens
from emlxd.api.schema import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from emlxd.api.surface import Services, Worker
from emlxd.errors import RequestError


def routes(services: Services) -> Blueprint:
    blueprint = Blueprint("tokenization", __name__)
    max_bytes = services.settings.server.max_body_bytes

    @blueprint.post("/tokenize")
    async def tokenize() -> Response:
        body = await read_checked(tokenize_body, max_bytes)
        worker = await lease(services, body.model)
        if isinstance(body, TokenizeChatBody):
            tokens = list((await chat_prompt(worker, body)).tokens)
        else:
            special = body.add_special_tokens is not False
            tokens = await worker.encode(body.prompt, add_special_tokens=special)
        show = partial(_tokens, worker, tokens, named=bool(body.return_token_strs))
        return json_bytes(await offload(show, large=len(tokens) > LARGE_ARRAY))

    @blueprint.post("/detokenize")
    async def detokenize() -> Response:
        """Special tokens are written out, so that this undoes /tokenize."""
        body = await read_body(DetokenizeBody, max_bytes)
        worker = await lease(services, body.model)
        show = partial(_text, worker, body.tokens)
        return json_bytes(await offload(show, large=len(body.tokens) > LARGE_ARRAY))

    return blueprint


def tokenize_body(data: dict[str, Any]) -> TokenizeTextBody | TokenizeChatBody:
    """A text or a conversation. Raises RequestError for both at once."""
    if data.get("messages") is None:
        return validate(TokenizeTextBody, data)
    if data.get("prompt") is not None:
        raise RequestError("Expected 'prompt' or 'messages', not both.", param="prompt", code="invalid_value")
    return validate(TokenizeChatBody, data)


def _tokens(worker: Worker, tokens: Sequence[int], *, named: bool) -> bytes:
    return orjson.dumps(
        {
            "count": len(tokens),
            "max_model_len": worker.info.max_context,
            "tokens": tokens,
            "token_strs": [token_name(worker.tokenizer, token) for token in tokens] if named else None,
        }
    )


def _text(worker: Worker, tokens: Sequence[int]) -> bytes:
    """Raises RequestError for a token id that the model does not have."""
    check_tokens(worker, tokens, "tokens")
    return orjson.dumps({"prompt": worker.tokenizer.decode(tokens, skip_special_tokens=False)})
