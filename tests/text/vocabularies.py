"""Small tokenizers for tests, as GGUF metadata."""

from __future__ import annotations

from typing import Any

from emlxd.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def printable(data: bytes) -> str:
    """``data`` in GPT-2's alphabet, worked out from its definition."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return "".join(chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in data)


def bpe_metadata(
    merged: tuple[str, ...] = (
        "he",
        "ll",
        "hell",
        "hello",
        " w",
        "or",
        " wor",
        "ld",
        " world",
        "é",
        "你",
        "😀",
    ),
    *,
    pre: str = "gpt-2",
    **extra: Any,
) -> dict[str, Any]:
    """Byte-level BPE over all bytes; each of ``merged`` is built from the longest pieces before it."""
    pieces = [bytes([byte]) for byte in range(256)]
    merges = []
    for text in merged:
        whole = text.encode()
        for cut in sorted(range(1, len(whole)), reverse=True):
            left = whole[:cut]
            if left in pieces and whole[cut:] in pieces:
                merges.append(f"{printable(left)} {printable(whole[cut:])}")
                break
            if left not in pieces and left[:-1] in pieces:
                merges.append(f"{printable(left[:-1])} {printable(left[-1:])}")
                pieces.append(left)
        pieces.append(whole)
    tokens = [printable(piece) for piece in dict.fromkeys(pieces)]
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *specials, "<think>"],
        "tokenizer.ggml.token_type": [NORMAL] * len(tokens) + [CONTROL] * 3 + [USER_DEFINED],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) + 1,
        "tokenizer.ggml.eos_token_id": len(tokens) + 2,
        **{f"tokenizer.ggml.{name}": value for name, value in extra.items()},
    }


def spm_metadata(**extra: Any) -> dict[str, Any]:
    """SentencePiece BPE with byte fallback."""
    pieces = ["▁", "h", "e", "l", "o", "w", "r", "d", "ř", "▁w", "ll", "he", "hell", "hello", "▁hello", "or"]
    pieces += ["▁wor", "ld", "▁world", "▁▁"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            "<unk>",
            "<s>",
            "</s>",
            *(f"<0x{byte:02X}>" for byte in range(256)),
            *pieces,
        ],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        **{f"tokenizer.ggml.{name}": value for name, value in extra.items()},
    }


def bpe() -> Tokenizer:
    return Tokenizer.from_gguf(bpe_metadata())


def spm() -> Tokenizer:
    return Tokenizer.from_gguf(spm_metadata())
