"""Text to token ids and back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Encoding

from emlxd.core import TokenizedText
from emlxd.text import gguf_vocabulary, hf_vocabulary
from emlxd.text.vocabulary import Vocabulary

_SPACE = "\u2581"


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads.

    Every token stands for fixed bytes, and ``decode`` joins them: so decoding piece by piece gives
    the same text, which the backend's own decoder does not promise for broken UTF-8.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._backend = vocabulary.backend
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self.special_tokens = vocabulary.special_tokens
        self.chat_templates = vocabulary.chat_templates
        self.special_ids = frozenset(
            id for id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        ids = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1
        decoders = _decoder_kinds(self._backend.decoder)
        self.strips_leading_space = any(map(_strips_leading_space, decoders))
        self._bytes = [b""] * self.vocab_size
        for id, piece in zip(ids.values(), _pieces(ids, decoders), strict=True):
            self._bytes[id] = piece

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """From a Hugging Face folder. Raises ModelFormatError if it has no readable tokenizer."""
        return cls(hf_vocabulary.load(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From a GGUF file's key/values. Raises ModelFormatError for a kind that is not known."""
        return cls(gguf_vocabulary.load(metadata))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Special tokens written out in ``text`` become those tokens."""
        return self._encoding(text, add_special_tokens=add_special_tokens).ids

    def encode_pair(self, first: str, second: str) -> TokenizedText:
        """Two texts that are read together, as the model was trained to."""
        found = self._encoding((first, second))
        marks = zip(found.type_ids, found.sequence_ids, strict=True)
        begins = (index for index, mark in enumerate(marks) if 1 in mark)
        return TokenizedText(tuple(found.ids), next(begins, len(found.ids)))

    def _encoding(self, text: str | tuple[str, str], *, add_special_tokens: bool = True) -> Encoding:
        """Of a text or a pair. As a batch of one, because only for batches the backend releases the GIL."""
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def truncate(self, ids: Sequence[int], limit: int) -> list[int]:
        """At most ``limit`` ids; the special tokens at the end, which close a text, are kept."""
        if len(ids) <= limit:
            return list(ids)
        closing = 0
        while closing < limit and ids[-1 - closing] in self.special_ids:
            closing += 1
        return [*ids[: limit - closing], *ids[len(ids) - closing :]]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Broken UTF-8 becomes U+FFFD; ids outside of the vocabulary become nothing."""
        table = self.text_bytes if skip_special_tokens else self._bytes
        text = b"".join([table[id] for id in ids if 0 <= id < len(table)]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    @cached_property
    def text_bytes(self) -> list[bytes]:
        """By id, the bytes that a token adds to an answer: special tokens add none."""
        return [b"" if id in self.special_ids else piece for id, piece in enumerate(self._bytes)]

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, its name if it is a special one."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def id_of(self, token: str) -> int | None:
        return self._backend.token_to_id(token)


def _decoder_kinds(decoder: Any) -> list[dict[str, Any]]:
    """The settings of each step of a backend's decoder."""
    if decoder is None:
        return []
    settings = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = settings.get("decoders", [settings])
    return steps


def _strips_leading_space(decoder: Mapping[str, Any]) -> bool:
    match decoder:
        case {"type": "Strip", "content": " ", "start": start}:
            return bool(start)
        case {"type": "Metaspace"}:
            return bool(decoder.get("prepend_scheme") != "never")
        case _:
            return False


def _pieces(tokens: Iterable[str], decoders: list[dict[str, Any]]) -> Iterable[bytes]:
    kinds = {decoder["type"] for decoder in decoders}
    if "ByteLevel" in kinds:
        return _byte_level_pieces(tokens)
    if "ByteFallback" in kinds:
        return (_byte_fallback_piece(token) for token in tokens)
    if "Metaspace" in kinds:
        return (token.replace(_SPACE, " ").encode() for token in tokens)
    return (token.encode() for token in tokens)


def _byte_fallback_piece(token: str) -> bytes:
    if len(token) == 6 and (byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)):
        return bytes.fromhex(byte[1])
    return token.replace(_SPACE, " ").encode()


def _byte_level_pieces(tokens: Iterable[str]) -> Iterable[bytes]:
    """Undo GPT-2's alphabet, in which each byte is a printable character.

    A token that is not written in it (an added one) is plain text.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    foreign = dict.fromkeys(hidden, 0xFFFF)
    alphabet = foreign | {256 + index: byte for index, byte in enumerate(hidden)}
    for token in tokens:
        try:
            yield token.translate(alphabet).encode("latin-1")
        except UnicodeEncodeError:
            yield token.encode()
