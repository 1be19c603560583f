"""Token ids to text, one at a time."""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set

from emlxd.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one answer as its tokens come in: the pieces join to ``tokenizer.decode``.

    If the answer continues a text, ``after`` are the tokens of that text, and the pieces join to what the
    answer adds to it. Special tokens add nothing, but for those in ``keep``. A character is released once all
    of its bytes are there.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, keep: Set[int] = frozenset(), after: Sequence[int] = ()
    ) -> None:
        self._bytes = tokenizer.text_bytes
        if keep:
            self._bytes = self._bytes.copy()
            for id in keep:
                self._bytes[id] = tokenizer.token_bytes(id)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # SentencePiece writes words with a space in front, which the first word of a text must lose.
        self._at_start = tokenizer.strips_leading_space and not any(map(self._bytes_of, after))

    def push(self, token_id: int) -> str:
        text = self._decoder.decode(self._bytes_of(token_id))
        return self._strip(text) if self._at_start else text

    def flush(self) -> str:
        """What an unfinished character left behind, as U+FFFD."""
        return self._decoder.decode(b"", True)

    @property
    def within_character(self) -> bool:
        """Whether a character has begun that is not complete yet."""
        return bool(self._decoder.getstate()[0])

    def _bytes_of(self, token_id: int) -> bytes:
        """Nothing for an id past the vocabulary: a model's output may be wider."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def _strip(self, text: str) -> str:
        self._at_start = not text
        return text.removeprefix(" ")
