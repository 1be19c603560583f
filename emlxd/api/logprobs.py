"""Log-probabilities as OpenAI's two completion APIs and its Responses API show them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from emlxd.api.json_values import Json
from emlxd.api.surface import Tokenizer
from emlxd.core import TokenLogprob

LEAST = -9999.0  # OpenAI's number for a token that is out of the question


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token. Part of a character has none, and is shown as OpenAI does: its bytes, escaped."""
    piece = tokenizer.token_bytes(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def token_objects(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> list[Json]:
    """``logprobs.content`` of a chat choice; a Responses output text has the same."""
    return [
        _token_object(tokenizer, entry.token, entry.logprob)
        | {"top_logprobs": [_token_object(tokenizer, *likely) for likely in entry.top]}
        for entry in entries
    ]


def _token_object(tokenizer: Tokenizer, token: int, logprob: float) -> Json:
    return {
        "token": token_name(tokenizer, token),
        "logprob": max(logprob, LEAST),
        "bytes": list(_text(tokenizer, token)),
    }


def _text(tokenizer: Tokenizer, token: int) -> bytes:
    """What a token adds to the text: nothing if it is a special one."""
    table = tokenizer.text_bytes
    return table[token] if token < len(table) else b""


class TextLogprobs:
    """The logprobs of one text completion, part by part, each token with where it begins in the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._length = 0  # characters so far
        self._decoder = _new_decoder()
        self._strips = tokenizer.strips_leading_space  # which an answer's text does at its start

    def prompt(self, text: str, tokens: Sequence[int], entries: Sequence[TokenLogprob | None]) -> Json:
        """An echoed prompt's. What its tokens say before ``text`` starts (a begin token) is at 0."""
        pieces = [self._tokenizer.token_bytes(token) for token in tokens]
        self._length = len(text) - len(b"".join(pieces).decode("utf-8", "replace"))
        part = self._part(tokens, pieces, entries)
        self._length, self._decoder = len(text), _new_decoder()
        return part

    def answer(self, entries: Sequence[TokenLogprob]) -> Json:
        tokens = [entry.token for entry in entries]
        return self._part(tokens, [self._text(token) for token in tokens], entries)

    def _text(self, token: int) -> bytes:
        piece = _text(self._tokenizer, token)
        if self._strips and piece:
            self._strips = False
            return piece.removeprefix(b" ")
        return piece

    def _part(
        self, tokens: Sequence[int], pieces: Sequence[bytes], entries: Sequence[TokenLogprob | None]
    ) -> Json:
        return {
            "tokens": [token_name(self._tokenizer, token) for token in tokens],
            "token_logprobs": [None if entry is None else max(entry.logprob, LEAST) for entry in entries],
            "top_logprobs": [None if entry is None else self._likely(entry) for entry in entries],
            "text_offset": [self._offset(piece) for piece in pieces],
        }

    def _likely(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens, and always the one that is there."""
        return {
            token_name(self._tokenizer, token): max(logprob, LEAST)
            for token, logprob in (*entry.top, (entry.token, entry.logprob))
        }

    def _offset(self, piece: bytes) -> int:
        """Where ``piece`` begins. One that goes on with a character begins where the character does."""
        begun = bool(self._decoder.getstate()[0])
        start = self._length + (begun and bool(piece) and not _continues(piece[0]))  # it stays unfinished
        self._length += len(self._decoder.decode(piece))
        return max(start, 0)


def _new_decoder() -> codecs.IncrementalDecoder:
    """As that of an answer's text."""
    return codecs.getincrementaldecoder("utf-8")("replace")


def _continues(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def join_parts(parts: Iterable[Json]) -> Json:
    """Parts of one completion's logprobs as one."""
    joined: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        for name, values in part.items():
            joined[name] += values
    return joined
