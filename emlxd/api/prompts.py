"""What a client wrote, in the model's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from emlxd.api.offload import LARGE_ARRAY, LARGE_COUNT, offload
from emlxd.api.schema import ChatPrompt
from emlxd.api.surface import Worker
from emlxd.core import Shape
from emlxd.errors import RequestError
from emlxd.text.dialect import Wishes


@dataclass(frozen=True, slots=True)
class Prompt:
    """``param`` is the field it came from, for errors. ``scored`` asks for the prompt's own logprobs.

    ``shape`` is that of the answers to it; ``continues`` says that they go on with its text.
    """

    tokens: Sequence[int]
    param: str
    scored: bool = False
    shape: Shape = field(default_factory=Shape)
    continues: bool = False


async def chat_prompt(worker: Worker, body: ChatPrompt) -> Prompt:
    """The conversation as the model's chat template writes it, in tokens."""
    messages = await offload(
        lambda: [message.for_template() for message in body.messages],
        large=len(body.messages) > LARGE_COUNT,
    )
    tokens = await worker.encode_chat(
        messages,
        add_generation_prompt=body.begins,
        continue_final_message=body.continues,
        tools=body.calling.for_template,
        **body.thinking_variables | (body.chat_template_kwargs or {}),
    )
    return Prompt(tokens, "messages", continues=bool(body.continues))


@contextmanager
def told_of(param: str) -> Iterator[None]:
    """Errors of the messages become errors of ``param``, which they were made of."""
    try:
        yield
    except RequestError as error:
        if error.param == "messages":
            error.param = param
        raise


async def shaped(worker: Worker, prompt: Prompt, wishes: Wishes) -> Prompt:
    """``prompt`` with the shape of its answers. Raises RequestError if that cannot be enforced."""
    return replace(prompt, shape=await worker.shape(prompt.tokens, wishes))


async def text_prompt(
    worker: Worker, prompt: str | Sequence[int], *, param: str = "prompt", scored: bool = False
) -> Prompt:
    """Raises RequestError for a token id that the model does not have."""
    if isinstance(prompt, str):
        return Prompt(await worker.encode(prompt), param, scored, continues=True)
    await offload(lambda: check_tokens(worker, prompt, param), large=len(prompt) > LARGE_ARRAY)
    return Prompt(prompt, param, scored, continues=True)


def check_tokens(worker: Worker, tokens: Sequence[int], param: str) -> None:
    """Raises RequestError for a token id that the model does not have."""
    size = worker.info.vocab_size
    for token in tokens:
        if not 0 <= token < size:
            raise RequestError(
                f"Token id {token} is out of range; this model's are 0 to {size - 1}.",
                param=param,
                code="invalid_value",
            )
