"""From sampled tokens to the text that a client may see."""

from __future__ import annotations

from emlxd.core import Chunking
from emlxd.text.detokenizer import Detokenizer
from emlxd.text.stop import StopMatcher
from emlxd.text.tokenizer import Tokenizer
from emlxd.text.words import WordChunker


class OutputText:
    """The text of one answer: detokenized, ended at a stop string, cut into words or not."""

    def __init__(
        self, tokenizer: Tokenizer, *, stop: tuple[str, ...] = (), chunking: Chunking = "word"
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(stop) if stop else None
        self._words = WordChunker() if chunking == "word" else None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched if self._stops else None

    def push(self, token_id: int) -> str:
        """What became final with this token; often nothing."""
        text = self._detokenizer.push(token_id)
        if self._stops:
            text = self._stops.push(text)
            if self._stops.matched is not None:
                return self._chunk(text, last=True)
        return self._chunk(text) if text else ""

    def finish(self) -> str:
        """The rest of the text. Nothing may be pushed after it."""
        text = self._detokenizer.flush()
        if self._stops:
            text = self._stops.push(text) + self._stops.flush()
        return self._chunk(text, last=True)

    def _chunk(self, text: str, *, last: bool = False) -> str:
        if self._words is None:
            return text
        released = self._words.push(text)
        return released + self._words.flush() if last else released
