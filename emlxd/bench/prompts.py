"""Prompts of a wanted length that no prefix cache has seen."""

from __future__ import annotations

import random

# Short, common words: nearly every tokenizer has each of them, with its space, as one token.
_COMMON = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work number night point home water "
    "room mother area money story fact month lot right study book eye job word business issue side kind "
    "head house service friend father power hour game line end member law car city name team minute idea "
    "body back parent face level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher force"
)
WORDS = tuple(_COMMON.split())


def make_prompt(words: int, seed: str, *, shared: int = 0) -> str:
    """A text of ``words`` words: the first ``shared`` are the same for every seed, the others random."""
    common = random.Random("shared").choices(WORDS, k=min(shared, words))
    own = random.Random(seed).choices(WORDS, k=words - len(common))
    return " ".join(common + own)
