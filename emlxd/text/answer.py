"""One answer from its sampled tokens: what the client sees of it, and what may come next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import structlog

from emlxd.core import Channel, GenerateRequest, Grammar, TextPiece, TokenLogprob, ToolCallPiece
from emlxd.errors import ServerFault
from emlxd.text.channels import Channels
from emlxd.text.detokenizer import Detokenizer
from emlxd.text.grammar import Matcher, only
from emlxd.text.outlet import LogprobQueue, Outlet
from emlxd.text.reader import Read, Text
from emlxd.text.tokenizer import Tokenizer
from emlxd.text.tools.table import FORMATS

log = structlog.get_logger(__name__)

Piece = TextPiece | ToolCallPiece


class Answer:
    """Takes tokens, gives pieces. Where the answer is held to a form, ``mask`` tells what may come."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: GenerateRequest,
        matcher: Callable[[Grammar], Matcher],
        *,
        index: int = 0,
        mask_bytes: int = 0,
    ) -> None:
        """``matcher`` gives the matcher of a compiled grammar; ``mask_bytes`` is the size of a mask."""
        shape = request.shape
        self._request_id = request.id
        self._index = index
        self._shape = shape
        self._tokenizer = tokenizer
        self._make_matcher = matcher
        self._mask_bytes = mask_bytes
        after = request.prompt if request.continues else ()
        self._detokenizer = Detokenizer(tokenizer, keep=_kept_ids(tokenizer, request), after=after)
        self._characters = 0
        self._channels = Channels(shape)
        self._outlets: dict[Channel, Outlet] = {
            "content": Outlet(stop=request.stop, chunking=request.chunking),
            "reasoning": Outlet(chunking=request.chunking),
        }
        self._channel: Channel = "content"
        self._logprobs = LogprobQueue() if request.sampling.logprobs is not None else None
        self._matcher = matcher(shape.grammar) if shape.grammar else None
        if self._matcher and self._channels.calls:
            self._channels.calls.hold(alone=shape.calls_alone)
        # May come first, whatever the grammar says: the token with which the model chooses to think.
        self._think = _opening(tokenizer, request) if self._matcher else None
        self._forced: deque[int] = deque()
        self._refused_call = False
        self.reasoning_tokens = 0
        self._force_if_over_budget()

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer."""
        return self._outlets["content"].stopped

    @property
    def called(self) -> bool:
        """Whether there is a tool call in it."""
        return bool(self._channels.calls and self._channels.calls.calls)

    @property
    def guarded(self) -> bool:
        """Whether some of its tokens may need a mask."""
        return self._shape.guarded

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        if self._matcher and not self._waits and not self._forced:
            return self._matcher.finished
        calls = self._channels.calls
        return bool(calls and calls.calls and calls.entered is None and not self._shape.parallel_calls)

    def mask(self) -> bytes | None:
        """The tokens that may come next, as ``Matcher.mask``; None if all may."""
        if self._forced:
            return only(self._forced[0], self._mask_bytes)
        if self._matcher is None or self._waits:
            return None
        mask = self._matcher.mask()
        return mask if self._think is None else only(self._think, self._mask_bytes, mask)

    def push(self, token: int, logprob: TokenLogprob | None = None) -> list[Piece]:
        """What became final with this token; often nothing. Raises ServerFault if it may not come."""
        thought = self._channels.thinking
        text = self._detokenizer.push(token)
        self._characters += len(text)
        if self._logprobs and logprob:
            self._logprobs.push(logprob, self._characters + self._detokenizer.within_character)
        reads = self._channels.push(text) if text else []
        if thought or self._channels.thinking:
            self.reasoning_tokens += 1
        self._follow(token, reads, was_waiting=thought and self._shape.thinking is not None)
        reads += self._hold_call()
        self._force_if_over_budget()
        return self._pieces(reads)

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """The rest. ``cut`` says that the answer did not come to its own end."""
        text = self._detokenizer.flush()
        reads = (self._channels.push(text) if text else []) + self._channels.finish(cut=cut)
        pieces = self._pieces(reads) + self._flush()
        if cut and self._logprobs and self._channels.plain and self.stopped is None:
            rest = self._logprobs.release_all()
            pieces += [TextPiece("", self._index, rest)] if rest else []
        if (calls := self._channels.calls) and calls.malformed:
            log.warning("tool call malformed", request=self._request_id, format=self._shape.call_format)
        return pieces

    @property
    def _waits(self) -> bool:
        """Whether the grammar still waits for the end of thinking, which is not a part of it."""
        return self._shape.thinking is not None and self._channels.thinking

    def _follow(self, token: int, reads: list[Read], *, was_waiting: bool) -> None:
        """Advances the grammar by ``token``, or by the text that follows the end of thinking."""
        if self._forced and self._forced[0] == token:
            self._forced.popleft()
        if self._matcher is None:
            return
        chose_to_think, self._think = token == self._think, None
        if was_waiting:
            begun = "".join(
                read.text for read in reads if isinstance(read, Text) and read.channel == "content"
            )
            if begun and not self._waits and not self._matcher.accepts_text(begun):
                raise ServerFault(
                    "The end of the thinking ran into the answer, which does not fit its grammar."
                )
        elif not chose_to_think:
            self._matcher.accept(token)

    def _hold_call(self) -> list[Read]:
        """Once a call has begun, holds it to its grammar, if what there is of it fits."""
        calls, grammar = self._channels.calls, self._shape.call_grammar
        if calls is None or grammar is None or calls.held:
            return []
        if calls.entered is None:
            self._refused_call = False
            return []
        if self._refused_call:
            return []
        matcher = self._make_matcher(grammar)
        if not matcher.accepts_text(calls.entered):
            self._refused_call = True
            return []
        self._matcher = matcher
        return calls.hold()

    def _force_if_over_budget(self) -> None:
        limit = self._shape.max_reasoning_tokens
        over = limit is not None and self.reasoning_tokens >= limit
        if over and self._channels.thinking and not self._forced:
            self._forced.extend(self._tokenizer.encode(self._end_of_thinking(), add_special_tokens=False))

    def _end_of_thinking(self) -> str:
        if self._shape.thinking:
            return f"\n{self._shape.thinking.close}" + ("" if self._matcher else "\n\n")
        return FORMATS[self._shape.call_format].end_of_thinking(held=self._matcher is not None)

    def _pieces(self, reads: list[Read]) -> list[Piece]:
        pieces: list[Piece] = []
        for read in reads:
            if self.stopped is not None:
                break
            if isinstance(read, Text):
                if read.channel != self._channel:
                    pieces += self._flush()
                    self._channel = read.channel
                if self._logprobs and read.channel == "content":
                    self._logprobs.read(read)
                pieces += self._text(self._outlets[read.channel].push(read.text))
            else:
                pieces += self._flush()
                pieces.append(ToolCallPiece(read.call, read.arguments, read.id, read.name, self._index))
        return pieces

    def _flush(self) -> list[Piece]:
        return [*self._text(self._outlets[self._channel].flush())]

    def _text(self, text: str) -> list[TextPiece]:
        if not text:
            return []
        content = self._channel == "content"
        found = self._logprobs.release(len(text)) if self._logprobs and content else ()
        return [TextPiece(text, self._index, found, self._channel)]


def _kept_ids(tokenizer: Tokenizer, request: GenerateRequest) -> frozenset[int]:
    """The special tokens that are kept as text, because readers look for them."""
    shape = request.shape
    marks = [*FORMATS[shape.call_format].markers] if shape.call_format else []
    if shape.thinking:
        marks += [shape.thinking.open, shape.thinking.close]
    ids = {tokenizer.id_of(mark) for mark in marks}
    return frozenset(id for id in ids if id is not None)


def _opening(tokenizer: Tokenizer, request: GenerateRequest) -> int | None:
    thinking = request.shape.thinking
    return tokenizer.id_of(thinking.open) if thinking and thinking.start == "undecided" else None
