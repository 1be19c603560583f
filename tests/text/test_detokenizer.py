"""Text piece by piece equals text at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from emlxd.text.detokenizer import Detokenizer
from emlxd.text.tokenizer import Tokenizer
from tests.text.vocabularies import bpe, spm

_BPE, _SPM = bpe(), spm()
tokenizers = pytest.mark.parametrize("tokenizer", [_BPE, _SPM], ids=["byte-level", "sentencepiece"])


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@tokenizers
@given(data=st.data())
def test_pieces_join_to_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    # Ids past the end too: a model's output may be wider than its vocabulary.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2)))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@tokenizers
@given(text=st.text(alphabet=st.sampled_from("hello world příliš žluťoučký 你好 한국 😀👩\u200d💻🇨🇿é\n")))
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert "".join(pieces(tokenizer, tokenizer.encode(text))) == text


def test_character_is_whole_before_it_is_released() -> None:
    ids = [_BPE.encode(bytes([byte]).decode("latin-1"))[0] for byte in b"a"] + list("ř😀".encode())
    assert pieces(_BPE, ids) == ["a", "", "ř", "", "", "", "😀", ""]


def test_unfinished_character_shows_at_the_end() -> None:
    assert pieces(_BPE, list("ř".encode())[:1]) == ["", "\ufffd"]


def test_special_tokens_are_skipped_inside_of_a_character() -> None:
    end = _BPE.id_of("<|im_end|>")
    assert end is not None
    first, second = "ř".encode()
    assert "".join(pieces(_BPE, [first, end, second])) == "ř"


@tokenizers
@given(data=st.data())
def test_an_answer_that_goes_on_adds_what_transformers_decodes_more(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend, clean_up_tokenization_spaces=False)
    words = st.lists(st.sampled_from(["hello", "world", " ", "  ", "ř", "wor"]), max_size=6)
    prompt, answer = (tokenizer.encode("".join(data.draw(words))) for _ in range(2))
    before, whole = (theirs.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + answer))
    detokenizer = Detokenizer(tokenizer, after=prompt)
    assert "".join([*map(detokenizer.push, answer), detokenizer.flush()]) == whole[len(before) :]


def test_an_answer_to_a_prompt_without_text_is_a_beginning() -> None:
    bos, world = (_SPM.id_of(token) for token in ("<s>", "▁world"))
    assert bos is not None and world is not None
    assert Detokenizer(_SPM, after=[bos]).push(world) == "world"
    assert Detokenizer(_SPM, after=[bos, world]).push(world) == " world"


def test_only_the_first_space_is_stripped() -> None:
    hello, world, bos = (_SPM.id_of(token) for token in ("▁hello", "▁world", "<s>"))
    assert pieces(_SPM, [bos, hello, world]) == ["", "hello", " world", ""]  # type: ignore[list-item]
    double = _SPM.id_of("▁▁")
    assert pieces(_SPM, [double, world]) == [" ", " world", ""]  # type: ignore[list-item]
