"""When an answer's text is released to the client: whole words, and nothing from a stop string on."""

from __future__ import annotations

from collections import deque

from emlxd.core import Chunking, TokenLogprob
from emlxd.text.reader import Text
from emlxd.text.stop import StopMatcher
from emlxd.text.words import WordChunker


class Outlet:
    """Text that ends at a stop string and is released in words or at once."""

    def __init__(self, *, stop: tuple[str, ...] = (), chunking: Chunking = "word") -> None:
        self._stops = StopMatcher(stop) if stop else None
        self._words = WordChunker() if chunking == "word" else None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched if self._stops else None

    def push(self, text: str) -> str:
        """What became final with this text; often nothing."""
        if self._stops:
            text = self._stops.push(text)
            if self._stops.matched is not None:
                return self._chunk(text, last=True)
        return self._chunk(text) if text else ""

    def flush(self) -> str:
        """What was held back. To be called when no more text follows, or something else comes first."""
        return self._chunk(self._stops.flush() if self._stops else "", last=True)

    def _chunk(self, text: str, *, last: bool = False) -> str:
        if self._words is None:
            return text
        released = self._words.push(text)
        return released + self._words.flush() if last else released


class LogprobQueue:
    """Holds log-probabilities back until the content that their tokens end in is released."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, TokenLogprob]] = deque()
        # Where pieces of content end: counted in the content alone, and in the whole answer.
        self._spans: deque[tuple[int, int]] = deque()
        self._read = 0
        self._content = 0
        self._released = 0

    def push(self, logprob: TokenLogprob, end: int) -> None:
        """``end`` is where the token's text ends in the answer's."""
        self._queue.append((end, logprob))

    def read(self, content: Text) -> None:
        """Notes content that will be released. Tokens between the content before and this one are dropped."""
        start = content.end - len(content.text)
        if start != self._read:
            self._take(start)
        self._read = content.end
        self._content += len(content.text)
        self._spans.append((self._content, content.end))

    def release(self, characters: int) -> tuple[TokenLogprob, ...]:
        """Those of the tokens that end within the next so many ``characters`` of content."""
        if not characters:
            return ()
        self._released += characters
        while self._spans[0][0] < self._released:
            self._spans.popleft()
        content, end = self._spans[0]
        return self._take(end - (content - self._released))

    def release_all(self) -> tuple[TokenLogprob, ...]:
        """Also those that have no text, or only part of a character's."""
        return self._take(self._queue[-1][0]) if self._queue else ()

    def _take(self, end: int) -> tuple[TokenLogprob, ...]:
        taken = []
        while self._queue and self._queue[0][0] <= end:
            taken.append(self._queue.popleft()[1])
        return tuple(taken)
