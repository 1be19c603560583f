"""What servers of this kind got wrong: every case has a test that says its number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

CASES = {
    1: "characters that span tokens come out whole",
    2: "a stop string that spans tokens is not sent, and what was held back for none is",
    3: "a client that leaves ends its generation, streamed or not",
    4: "a client that leaves in the middle of a write takes nothing else down",
    5: "an assistant's message of calls alone, and the tool's answer, reach the template",
    6: "text parts are all kept, in order, in every role",
    7: "developer is system for a template that knows no other",
    8: "usage in a stream is a last chunk without choices, when asked for",
    9: "a natural end is stop, the limit is length, streamed or not",
    10: "streamed calls are structured, and their markup is no text",
    11: "a streamed call has its index from its first delta on",
    12: "special tokens are never visible",
    13: "an unknown model is 404 at once; an alias is known",
    14: "a failure of generation is 500, or an error event in a stream",
    15: "a chunked body is read; no body is 400",
    16: "a preflight needs no key, and refusals can be read by an allowed page",
    17: "headers come early, and comments fill a long silence",
    18: "seeds repeat and differ, 0 is one, and none differs each time",
    19: "logprobs that are asked for are there",
    20: "a prompt over the context is refused with both numbers",
    21: "max_completion_tokens is a limit",
    22: "embeddings in base64 when asked for",
    23: "a limit that is huge, absent, zero or negative has its meaning",
}


@pytest.fixture(scope="module")
def numbers() -> set[int]:
    texts = [file.read_text() for file in TESTS.rglob("test_*.py")]
    told = [line for text in texts for line in re.findall(r"[Ee]dge[ _]cases?[ _][\d, and]+", text)]
    return {int(number) for line in told for number in re.findall(r"\d+", line)}


@pytest.mark.parametrize("number", CASES, ids=CASES.get)
def test_it_has_a_test(numbers: set[int], number: int) -> None:
    assert number in numbers
