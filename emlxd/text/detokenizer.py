"""Token ids to text, one at a time."""

from __future__ import annotations

import codecs
from collections.abc import Set

from emlxd.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one answer as its tokens come in: the pieces join to ``tokenizer.decode``.

    Special tokens add nothing, but for those in ``keep``, and a character is released once all of its
    bytes are there.
    """

    def __init__(self, tokenizer: Tokenizer, *, keep: Set[int] = frozenset()) -> None:
        self._bytes = tokenizer.text_bytes
        if keep:
            self._bytes = self._bytes.copy()
            for id in keep:
                self._bytes[id] = tokenizer.token_bytes(id)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.strips_leading_space

    def push(self, token_id: int) -> str:
        # A model's output may be wider than its vocabulary.
        text = self._decoder.decode(self._bytes[token_id] if token_id < len(self._bytes) else b"")
        return self._strip(text) if self._at_start else text

    def flush(self) -> str:
        """What an unfinished character left behind, as U+FFFD."""
        return self._decoder.decode(b"", True)

    @property
    def within_character(self) -> bool:
        """Whether a character has begun that is not complete yet."""
        return bool(self._decoder.getstate()[0])

    def _strip(self, text: str) -> str:
        self._at_start = not text
        return text.removeprefix(" ")
