"""Texts for models that read them whole: pairs, what closes a text, and texts that are too long."""

from __future__ import annotations

from pathlib import Path

import pytest

from emlxd.core import TokenizedText
from emlxd.text.tokenizer import Tokenizer
from tests.wordpiece import CLS, SEP, A, write_wordpiece

B, C = A + 1, A + 2


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_folder(write_wordpiece(tmp_path))


def test_a_text_is_closed_by_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("A b") == [CLS, A, B, SEP]
    assert tokenizer.encode("A b", add_special_tokens=False) == [A, B]


def test_pairs(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_pair("a b", "c") == TokenizedText((CLS, A, B, SEP, C, SEP), 4)
    assert tokenizer.encode_pair("a", "") == TokenizedText((CLS, A, SEP, SEP), 3)


@pytest.mark.parametrize(
    ("limit", "kept"),
    [(5, [CLS, A, B, C, SEP]), (4, [CLS, A, B, SEP]), (3, [CLS, A, SEP]), (1, [SEP])],
)
def test_what_closes_a_text_is_kept(tokenizer: Tokenizer, limit: int, kept: list[int]) -> None:
    assert tokenizer.truncate([CLS, A, B, C, SEP], limit) == kept
    assert tokenizer.truncate([A, B, C], limit) == [A, B, C][:limit]


def test_qwen_adds_what_its_tokenizer_json_says(tmp_path: Path) -> None:
    """Its embedding models pool at the token that is added at the end."""
    config = {"add_bos_token": False, "add_eos_token": False}
    qwen = write_wordpiece(tmp_path / "qwen", tokenizer_class="Qwen2Tokenizer", **config)
    assert Tokenizer.from_folder(qwen).encode("a") == [CLS, A, SEP]
    llama = write_wordpiece(tmp_path / "llama", tokenizer_class="LlamaTokenizer", **config)
    assert Tokenizer.from_folder(llama).encode("a") == [A]
