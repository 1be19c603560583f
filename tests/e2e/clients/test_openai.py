"""OpenAI's Python client and a real model: what the fakes of tests/api take for granted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.api.strict import assert_known_fields
from tests.daemon import Daemon

pytestmark = pytest.mark.model

TokensOf = Callable[[str], list[int]]

HELLO: list[Any] = [{"role": "user", "content": "Why is the sky blue?"}]
GREEDY: dict[str, Any] = {"model": "smol", "messages": HELLO, "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def tokens_of(daemon: Daemon) -> TokensOf:
    def tokenize(text: str) -> list[int]:
        body = {"model": "smol", "prompt": text, "add_special_tokens": False}
        tokens: list[int] = httpx.post(f"{daemon.url}/tokenize", json=body).json()["tokens"]
        return tokens

    return tokenize


def said(client: openai.OpenAI, **fields: Any) -> str:
    answer = client.chat.completions.create(**GREEDY | fields)
    assert_known_fields(answer)
    return answer.choices[0].message.content or ""


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str, str | None]:
    text, reason = "", None
    for chunk in client.chat.completions.create(**GREEDY | fields, stream=True):
        assert_known_fields(chunk)
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smol", "org/smol", "smol:odd"]
    assert client.models.retrieve("org/smol").id == "org/smol"


def test_conversation(client: openai.OpenAI) -> None:
    first = said(client)
    assert first and (first, "length") == streamed(client)
    second = said(
        client,
        messages=[
            *HELLO,
            {"role": "assistant", "content": first},
            {
                "role": "user",
                "content": [{"type": "text", "text": "And"}, {"type": "text", "text": " at dawn?"}],
            },
        ],
    )
    assert second != first


def test_edge_case_1_characters_are_whole(client: openai.OpenAI) -> None:
    """A begun answer in Czech and emoji goes on token by token without a broken character."""
    asked = [{"role": "user", "content": "Repeat: žluťoučký kůň 😀 你好"}]
    begun = [*asked, {"role": "assistant", "content": "žluťoučký kůň 😀 你好, žluťoučký"}]
    fields: dict[str, Any] = {"messages": begun, "max_tokens": 24, "extra_body": {"stream_chunks": "token"}}
    text, _ = streamed(client, **fields)
    assert text == said(client, **fields) and "\ufffd" not in text[:-1]


def test_edge_case_2_a_stop_string_across_tokens(client: openai.OpenAI) -> None:
    whole = said(client)
    stop = whole[9:16]
    cut = whole[: whole.index(stop)]
    for text, reason in [streamed(client, stop=[stop]), (said(client, stop=stop), "stop")]:
        assert (text, reason) == (cut, "stop")
    assert said(client, stop=["never said"]) == whole


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_edge_case_21_both_limits(client: openai.OpenAI, field: str) -> None:
    fields = {name: value for name, value in GREEDY.items() if name != "max_tokens"} | {field: 3}
    answer = client.chat.completions.create(**fields)
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


def test_edge_case_18_seeds(client: openai.OpenAI) -> None:
    def at_random(seed: int | None) -> str:
        return said(client, temperature=1.5, seed=seed, max_tokens=16)

    assert len({at_random(seed) for seed in (0, 1, 2**62)}) == 3
    assert at_random(0) == at_random(0)
    assert at_random(-(2**63)) == at_random(-(2**63))
    assert at_random(None) != at_random(None)


def test_several_answers_share_a_prompt(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY | {"n": 3, "temperature": 1.5, "seed": 7})
    alone = client.chat.completions.create(**GREEDY | {"temperature": 1.5, "seed": 7})
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.choices[0].message.content == alone.choices[0].message.content
    assert answer.usage is not None and alone.usage is not None
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens


def test_logprobs_are_of_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY | {"logprobs": True, "top_logprobs": 3})
    found = answer.choices[0].logprobs
    assert found is not None and found.content
    data = bytes(byte for entry in found.content for byte in entry.bytes or [])
    assert data.decode() == answer.choices[0].message.content
    assert answer.usage is not None and len(found.content) == answer.usage.completion_tokens
    for entry in found.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(likely.logprob for likely in entry.top_logprobs) <= 0
    heard = []
    for chunk in client.chat.completions.create(**GREEDY | {"logprobs": True}, stream=True):
        choice = chunk.choices[0]
        if choice.logprobs is not None:
            assert choice.logprobs.content is not None
            piece = bytes(byte for entry in choice.logprobs.content for byte in entry.bytes or [])
            assert piece.decode() == choice.delta.content
            heard += choice.logprobs.content
    assert [entry.token for entry in heard] == [entry.token for entry in found.content]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("prompt", ["The capital of France is Paris", "The end.<|im_end|>", "Ž"])
def test_scores_of_a_prompt(client: openai.OpenAI, prompt: str, max_tokens: int) -> None:
    """As an evaluation harness reads them: the last entry is the answer's, also when that is an end token."""
    answer = client.completions.create(
        model="smol", prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
    )
    choice, usage = answer.choices[0], answer.usage
    assert usage is not None and choice.logprobs is not None
    found = choice.logprobs
    assert found.tokens and found.token_logprobs and found.top_logprobs and found.text_offset
    assert len(found.tokens) == len(found.token_logprobs) == usage.prompt_tokens + max_tokens
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert all(score < 0 for score in found.token_logprobs[1:])
    assert choice.text.startswith(prompt)
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        if not token.startswith("bytes:") and offset < len(prompt):
            assert choice.text[offset:].startswith(token)


def test_an_answer_scores_alike_as_a_prompt(client: openai.OpenAI, tokens_of: TokensOf) -> None:
    prompt = tokens_of("The capital of France is")
    fields: dict[str, Any] = {"model": "smol", "temperature": 0, "logprobs": 1}
    asked = client.completions.create(prompt=prompt, max_tokens=4, **fields).choices[0].logprobs
    assert asked and asked.tokens and asked.token_logprobs
    answer = [token for text in asked.tokens for token in tokens_of(text)]
    told = client.completions.create(prompt=[*prompt, *answer], max_tokens=0, echo=True, **fields)
    found = told.choices[0].logprobs
    assert len(answer) == 4 and found and found.token_logprobs
    assert found.token_logprobs[-4:] == pytest.approx(asked.token_logprobs, abs=0.01)


def test_ends_and_biases(client: openai.OpenAI, tokens_of: TokensOf) -> None:
    """A model that is made to end at once does so, but not before it may, or never.

    Edge case 12: what it says of the end is not text.
    """
    (end,) = tokens_of("<|im_end|>")

    def count(**fields: Any) -> int:
        answer = client.chat.completions.create(**GREEDY | fields, logit_bias={str(end): 100})
        assert answer.usage is not None
        return int(answer.usage.completion_tokens)

    assert count() == 1
    assert count(extra_body={"min_tokens": 5}) == 6
    assert count(extra_body={"ignore_eos": True}) == 12
    assert said(client, logit_bias={str(end): 100}, extra_body={"ignore_eos": True}) == ""
    (the,) = tokens_of(" the")
    assert said(client, logit_bias={str(the): 100}, max_tokens=3) == " the the the"


def test_a_whole_prompt_may_be_cached(client: openai.OpenAI) -> None:
    long: list[Any] = [{"role": "user", "content": "one two three " * 40}]
    first, second = (client.chat.completions.create(**GREEDY | {"messages": long}) for _ in range(2))
    assert second.choices[0].message.content == first.choices[0].message.content
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens


def test_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model="smol", input="Why is the sky blue?", temperature=0, max_output_tokens=8
    )
    assert_known_fields(first)
    assert first.status == "incomplete" and first.output_text
    events = list(
        client.responses.create(
            model="smol",
            input="And at dawn?",
            previous_response_id=first.id,
            temperature=0,
            max_output_tokens=8,
            stream=True,
        )
    )
    last = events[-1]
    assert last.type == "response.incomplete"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == last.response.output_text
    assert last.response.usage is not None and first.usage is not None
    assert last.response.usage.input_tokens > first.usage.input_tokens
    client.responses.delete(first.id)


def test_edge_case_13_only_models_of_the_configuration(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        said(client, model="mlx-community/SmolLM2-135M-Instruct")
    assert caught.value.code == "model_not_found"


def test_edge_case_20_a_prompt_over_the_context(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        said(client, messages=[{"role": "user", "content": "word " * 3000}])
    assert caught.value.code == "context_length_exceeded" and "1024" in caught.value.message


def test_a_model_that_does_not_embed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="smol", input="a")
