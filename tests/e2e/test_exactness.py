"""What the daemon answers is what mlx-lm computes from the same weights, token for token."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from tests.daemon import Daemon, running
from tests.device import only_on_cpu
from tests.e2e.conftest import MODEL
from tests.e2e.oracle import Oracle

pytestmark = [
    only_on_cpu("a GPU computes in bfloat16, which may round to another token"),
    pytest.mark.model,
    pytest.mark.timeout(900),
]  # the fixtures' work counts too

PROMPTS = [
    "Give me three facts about the Moon.",
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "What is 17 times 23?",
    "Translate 'good morning' into French.",
    "Name the planets of the solar system.",
    "Write a Python function that reverses a list.",
    "Explain what a hash table is to a child.",
    "Napiš větu v češtině.",
    "请用中文介绍一下你自己。",
    "List five fruits and their colours.",
    "Who wrote Hamlet?",
    "Summarise: The quick brown fox jumps over the lazy dog. The dog sleeps on.",
    "What comes after Monday?",
    "Give me a recipe for pancakes.",
    "😀 What does this emoji mean?",
    "Count from 1 to 20.",
    "Write a limerick about a cat named Max.",
    "def fibonacci(n):",
    "What is the difference between TCP and UDP? Answer in detail, with examples of where each is used.",
]
TOKENS = 64


@dataclass(frozen=True)
class Answer:
    """``tokens`` are the bytes of each, without an end token."""

    text: str
    tokens: list[bytes]
    completion_tokens: int


async def answer(daemon: Daemon, prompt: str) -> Answer:
    async with openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="none", timeout=300) as client:
        response = await client.chat.completions.create(
            model="smol",
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=TOKENS,
            logprobs=True,
        )
    choice = response.choices[0]
    assert response.usage and choice.logprobs and choice.logprobs.content is not None
    tokens = [bytes(token.bytes or []) for token in choice.logprobs.content]
    return Answer(choice.message.content or "", tokens, response.usage.completion_tokens)


@pytest.fixture(scope="module")
def batched(daemon: Daemon) -> dict[str, Answer]:
    """All prompts at once: the daemon decodes eight at a time, in changing company."""

    async def ask() -> list[Answer]:
        return await asyncio.gather(*(answer(daemon, prompt) for prompt in PROMPTS))

    return dict(zip(PROMPTS, asyncio.run(ask()), strict=True))


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


def chat_prompt(prompt: str) -> str:
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turns = [("system", system), ("user", prompt)]
    written = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return f"{written}<|im_start|>assistant\n"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_batched_answers_equal_the_oracle(batched: dict[str, Answer], oracle: Oracle, prompt: str) -> None:
    found = batched[prompt]
    expected = oracle.greedy(oracle.tokenizer.encode(chat_prompt(prompt)), TOKENS, guess=found.tokens)
    assert found.completion_tokens == len(expected)
    assert found.text == oracle.tokenizer.decode(expected)
    ended = expected[-1] in oracle.tokenizer.eos_ids
    assert found.tokens == [
        oracle.tokenizer.token_bytes(token) for token in expected[: -1 if ended else None]
    ]


def test_solo_answers_equal_batched_ones(daemon: Daemon, batched: dict[str, Answer]) -> None:
    for prompt in PROMPTS[::7]:
        assert asyncio.run(answer(daemon, prompt)) == batched[prompt]


def test_eager_answers_equal_compiled_ones(tmp_path: Path, batched: dict[str, Answer]) -> None:
    config = {"models": [MODEL | {"compile": False, "slots": 1, "prefill_chunk": 16}]}
    with running(tmp_path, config) as eager:
        for prompt in PROMPTS[:2]:
            assert asyncio.run(answer(eager, prompt)) == batched[prompt]
