"""A stand-in for a model: any token that the mask allows, by a seeded choice."""

from __future__ import annotations

import random
from collections.abc import Callable

from emlxd.text.grammar import Matcher
from emlxd.text.tokenizer import Tokenizer


def allowed(mask: bytes) -> list[int]:
    return [index for index in range(8 * len(mask)) if mask[index >> 3] >> (index & 7) & 1]


def pick(seed: int, tokenizer: Tokenizer) -> Callable[[bytes], int]:
    """Chooses a token by its mask. What closes a value is chosen more often: texts seldom end by chance."""
    choose = random.Random(seed)

    def token(mask: bytes) -> int:
        choices = allowed(mask)
        closing = [id for id in choices if id in tokenizer.eos_ids or tokenizer.token_bytes(id) in _CLOSING]
        return choose.choice(closing if closing and choose.random() < 0.4 else choices)

    return token


def walk(matcher: Matcher, tokenizer: Tokenizer, seed: int, limit: int = 600) -> list[int] | None:
    """The tokens of a random text, without the end token; None if it is not complete after ``limit``."""
    choose = pick(seed, tokenizer)
    tokens: list[int] = []
    while not matcher.finished and len(tokens) < limit:
        token = choose(matcher.mask())
        if token in tokenizer.eos_ids:
            return tokens
        matcher.accept(token)
        tokens.append(token)
    return tokens if matcher.finished else None


_CLOSING = {b'"', b"}", b"]"}
