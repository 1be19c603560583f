"""A stand-in for a model: any token that the mask allows, by a seeded choice."""

from __future__ import annotations

import random

from emlxd.text.grammar import Matcher
from emlxd.text.tokenizer import Tokenizer


def allowed(mask: bytes) -> list[int]:
    return [index for index in range(8 * len(mask)) if mask[index >> 3] >> (index & 7) & 1]


def walk(matcher: Matcher, tokenizer: Tokenizer, seed: int, limit: int = 600) -> list[int] | None:
    """The tokens of a random text, without the end token; None if it is not complete after ``limit``.

    What closes a value is chosen more often, since random texts seldom come to an end.
    """
    choose = random.Random(seed)
    tokens: list[int] = []
    while not matcher.finished and len(tokens) < limit:
        choices = allowed(matcher.mask())
        closing = [id for id in choices if id in tokenizer.eos_ids or tokenizer.token_bytes(id) in _CLOSING]
        token = choose.choice(closing if closing and choose.random() < 0.4 else choices)
        if token in tokenizer.eos_ids:
            return tokens
        matcher.accept(token)
        tokens.append(token)
    return tokens if matcher.finished else None


_CLOSING = {b'"', b"}", b"]"}
