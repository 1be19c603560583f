"""Encoding and decoding, from folders and from GGUF metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from emlxd.errors import ModelFormatError
from emlxd.text.gguf_vocabulary import load
from emlxd.text.pretokenizer import PRE_TOKENIZERS
from emlxd.text.tokenizer import Tokenizer
from tests.text.vocabularies import NORMAL, USER_DEFINED, bpe, bpe_metadata, spm, spm_metadata

CORPUS = [
    "Hello world! 12345 don't DON'T",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "你好。世界 日本語のテスト 한국어",
    "สวัสดีชาวโลก नमस्ते العربية",
    "👩\u200d💻 emoji 🇨🇿 ❤️",
    "    def f(x):\r\n\treturn x**2  \n\n\n",
    "<|im_start|>user\nHi<|im_end|>\n",
    "½ ² Ⅷ ١٢٣ a\u00a0b\u3000c ",
]


class TestByteLevel:
    def test_merges_and_special_tokens(self) -> None:
        tokenizer = bpe()
        ids = tokenizer.encode("<|im_start|>hello world<|im_end|>")
        assert [tokenizer.token_bytes(id).decode() for id in ids] == [
            "<|im_start|>",
            "hello",
            " world",
            "<|im_end|>",
        ]
        assert tokenizer.decode(ids) == "hello world"
        assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hello world<|im_end|>"

    def test_facts(self) -> None:
        tokenizer = bpe()
        names = [tokenizer.id_of(name) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
        assert tokenizer.special_ids == set(names)
        assert tokenizer.bos_id == names[1]
        assert tokenizer.eos_ids == {names[0], names[2]}
        assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
        assert tokenizer.id_of("no such token") is None
        assert tokenizer.vocab_size == len(bpe_metadata()["tokenizer.ggml.tokens"])

    def test_user_defined_token_is_text(self) -> None:
        tokenizer = bpe()
        think = tokenizer.id_of("<think>")
        assert tokenizer.encode("<think>") == [think]
        assert tokenizer.decode([think]) == "<think>"  # type: ignore[list-item]

    def test_user_defined_token_with_characters_outside_of_the_alphabet(self) -> None:
        metadata = bpe_metadata()
        metadata["tokenizer.ggml.tokens"] += ["a\u00a0b", "  "]
        metadata["tokenizer.ggml.token_type"] += [USER_DEFINED] * 2
        tokenizer = Tokenizer.from_gguf(metadata)
        assert tokenizer.decode(tokenizer.encode("a\u00a0b  ")) == "a\u00a0b  "
        assert len(tokenizer.encode("a\u00a0b  ")) == 2

    def test_first_of_equal_tokens_is_used(self) -> None:
        metadata = bpe_metadata()
        metadata["tokenizer.ggml.tokens"] += ["z"]
        metadata["tokenizer.ggml.token_type"] += [NORMAL]
        assert Tokenizer.from_gguf(metadata).encode("z") == [ord("z")]

    @pytest.mark.parametrize(("pre", "count"), [("llama-bpe", 1), ("gpt-2", 3)])
    def test_whole_token_without_merges(self, pre: str, count: int) -> None:
        metadata = bpe_metadata(pre=pre)
        metadata["tokenizer.ggml.tokens"] += ["xyz"]
        metadata["tokenizer.ggml.token_type"] += [NORMAL]
        tokenizer = Tokenizer.from_gguf(metadata)
        assert len(tokenizer.encode("xyz", add_special_tokens=False)) == count

    def test_bytes_of_tokens(self) -> None:
        tokenizer = bpe()
        assert [tokenizer.token_bytes(id) for id in range(256)] == [bytes([byte]) for byte in range(256)]
        assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
        assert tokenizer.decode([tokenizer.vocab_size, -1]) == ""

    def test_bos_only_when_wanted(self) -> None:
        tokenizer = Tokenizer.from_gguf(bpe_metadata(add_bos_token=True, add_eos_token=True))
        bos, eos = tokenizer.id_of("<|im_start|>"), tokenizer.id_of("<|im_end|>")
        assert tokenizer.encode("he") == [bos, tokenizer.id_of("he"), eos]
        assert tokenizer.encode("he", add_special_tokens=False) == [tokenizer.id_of("he")]

    def test_llama_3_starts_with_bos_by_itself(self) -> None:
        tokenizer = Tokenizer.from_gguf(bpe_metadata(pre="llama-bpe"))
        assert tokenizer.encode("he")[0] == tokenizer.bos_id

    def test_end_of_turn_and_end_of_message_also_end(self) -> None:
        tokenizer = Tokenizer.from_gguf(bpe_metadata(eot_token_id=5, eom_token_id=6))
        assert {5, 6} < tokenizer.eos_ids

    @given(st.text())
    def test_round_trip(self, text: str) -> None:
        tokenizer = _BPE
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


class TestSentencePiece:
    def test_space_prefix_is_added_and_taken_away(self) -> None:
        tokenizer = spm()
        ids = tokenizer.encode("hello world")
        assert [tokenizer.token_bytes(id).decode() for id in ids] == ["<s>", " hello", " world"]
        assert tokenizer.decode(ids) == "hello world"

    def test_no_space_prefix(self) -> None:
        tokenizer = Tokenizer.from_gguf(spm_metadata(add_space_prefix=False, add_bos_token=False))
        assert [tokenizer.token_bytes(id).decode() for id in tokenizer.encode("hello")] == ["hello"]
        assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"

    def test_characters_outside_of_the_vocabulary_become_bytes(self) -> None:
        tokenizer = spm()
        ids = tokenizer.encode("😀", add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == " 😀".encode()
        assert tokenizer.decode(ids) == "😀"

    @pytest.mark.parametrize(("first", "parts"), [("ab", ["ab", "c"]), ("bc", ["a", "bc"])])
    def test_better_score_merges_first(self, first: str, parts: list[str]) -> None:
        metadata = spm_metadata(add_space_prefix=False, add_bos_token=False)
        metadata["tokenizer.ggml.tokens"] += ["a", "b", "c", "ab", "bc"]
        metadata["tokenizer.ggml.token_type"] += [1] * 5
        metadata["tokenizer.ggml.scores"] += [-30, -31, -32, *([-33, -34] if first == "ab" else [-34, -33])]
        tokenizer = Tokenizer.from_gguf(metadata)
        assert [tokenizer.token_bytes(id).decode() for id in tokenizer.encode("abc")] == parts

    @given(st.text(alphabet="helo wrdř\n😀你"))
    def test_round_trip(self, text: str) -> None:
        assert _SPM.decode(_SPM.encode(text)) == text


_BPE = bpe()
_SPM = spm()


class TestPreTokenizers:
    """What the models' own tokenizer files say, written as Transformers' classes or as examples."""

    @pytest.mark.parametrize("text", CORPUS)
    @pytest.mark.parametrize(
        ("pre", "own"),
        [
            ("gpt-2", [pre_tokenizers.ByteLevel(add_prefix_space=False)]),
            (
                "smollm",
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ],
            ),
        ],
    )
    def test_same_as_the_stock_classes(self, pre: str, own: list[Any], text: str) -> None:
        expected = pre_tokenizers.Sequence(own).pre_tokenize_str(text)
        assert PRE_TOKENIZERS[pre].build().pre_tokenize_str(text) == expected

    @pytest.mark.parametrize(
        ("pre", "text", "pieces"),
        [
            ("llama-bpe", "I'M 12345\n\n x", ["I", "'M", " ", "123", "45", "\n\n", " x"]),
            ("qwen2", "I'm 123!\n", ["I", "'m", " ", "1", "2", "3", "!\n"]),
            ("tekken", "HTTPServer/x 12", ["HTTPServer", "/x", " ", "1", "2"]),
            ("gpt-4o", "camelCase don't 1234", ["camel", "Case", " don't", " ", "123", "4"]),
            ("deepseek-v3", "你好kana 1234.x", ["你好", "kana", " ", "123", "4", ".x"]),
            ("deepseek-llm", "foo 12, 你好", ["foo", " ", "12", ",", " ", "你好"]),
            ("default", "a$b 1234", ["a", "$", "b", " ", "123", "4"]),
            ("command-r", "it's 42", ["it", "'s", " ", "4", "2"]),
        ],
    )
    def test_pieces(self, pre: str, text: str, pieces: list[str]) -> None:
        cut = PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)
        assert [text[start:end] for _, (start, end) in cut] == pieces

    def test_every_row_builds(self) -> None:
        for kind in PRE_TOKENIZERS.values():
            assert kind.build().pre_tokenize_str("a 1")

    def test_qwen_composes_characters(self) -> None:
        tokenizer = Tokenizer.from_gguf(bpe_metadata(pre="qwen2"))
        assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


class TestBadGguf:
    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"tokenizer.ggml.pre": "klingon"}, r"pre-tokenizer 'klingon'.*known:.*smollm"),
            ({"tokenizer.ggml.model": "rwkv"}, r"model 'rwkv'.*supported: gpt2, llama"),
            ({"tokenizer.ggml.model": None}, r"tokenizer\.ggml\.model"),
            ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens"),
            ({"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.merges"),
            ({"tokenizer.ggml.merges": ["ab"]}, r"merge 'ab'"),
            ({"tokenizer.ggml.merges": ["no token"]}, r"damaged"),
            ({"tokenizer.ggml.token_type": [1]}, r"token_type has 1 entries"),
            ({"tokenizer.ggml.eos_token_id": "x"}, r"damaged"),
            ({"tokenizer.ggml.token_type": 3}, r"damaged"),
            ({"tokenizer.ggml.eos_token_id": 10**6}, r"eos_token_id is 1000000"),
        ],
    )
    def test_is_named(self, change: dict[str, Any], says: str) -> None:
        with pytest.raises(ModelFormatError, match=says):
            load(bpe_metadata() | change)

    def test_scores_are_required_and_complete(self) -> None:
        with pytest.raises(ModelFormatError, match=r"tokenizer\.ggml\.scores"):
            load(spm_metadata(scores=None))
        with pytest.raises(ModelFormatError, match="scores has 1 entries"):
            load(spm_metadata(scores=[0.0]))

    def test_chat_templates(self) -> None:
        metadata = bpe_metadata() | {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B"}
        assert Tokenizer.from_gguf(metadata).chat_templates == {"default": "A", "tool_use": "B"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    load(bpe_metadata()).backend.save(str(tmp_path / "tokenizer.json"))
    _write(tmp_path, "tokenizer_config.json", bos_token=None, eos_token={"content": "<|im_end|>"})
    return tmp_path


def _write(folder: Path, name: str, **content: Any) -> None:
    (folder / name).write_text(json.dumps(content), "utf-8")


class TestFolder:
    def test_same_as_gguf(self, folder: Path) -> None:
        tokenizer, other = Tokenizer.from_folder(folder), bpe()
        for text in CORPUS:
            assert tokenizer.encode(text) == other.encode(text)
        assert tokenizer.text_bytes == other.text_bytes
        assert tokenizer.bos_id is None
        assert tokenizer.eos_ids == {other.id_of("<|im_end|>")}
        assert tokenizer.special_tokens == {"eos_token": "<|im_end|>"}

    def test_special_tokens_map_fills_what_the_config_leaves_out(self, folder: Path) -> None:
        _write(folder, "special_tokens_map.json", bos_token="<|im_start|>", eos_token="<|endoftext|>")
        tokenizer = Tokenizer.from_folder(folder)
        assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
        assert tokenizer.bos_id == tokenizer.id_of("<|im_start|>")

    def test_generation_config_adds_ends(self, folder: Path) -> None:
        _write(folder, "config.json", eos_token_id=1)
        assert 1 in Tokenizer.from_folder(folder).eos_ids
        _write(folder, "generation_config.json", eos_token_id=[7, 8])
        tokenizer = Tokenizer.from_folder(folder)
        assert tokenizer.eos_ids == {7, 8, tokenizer.id_of("<|im_end|>")}

    def test_config_decides_about_bos(self, folder: Path) -> None:
        _write(folder, "tokenizer_config.json", add_bos_token=True, bos_token="<|im_start|>")
        tokenizer = Tokenizer.from_folder(folder)
        assert tokenizer.encode("he") == [tokenizer.bos_id, tokenizer.id_of("he")]

    def test_saved_truncation_is_not_applied(self, folder: Path) -> None:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.enable_truncation(4)
        backend.enable_padding(length=4)
        backend.save(str(folder / "tokenizer.json"))
        tokenizer = Tokenizer.from_folder(folder)
        assert len(tokenizer.encode("z" * 9)) == 9
        assert len(tokenizer.encode("z")) == 1

    def test_chat_templates(self, folder: Path) -> None:
        def found() -> dict[str, str]:
            return dict(Tokenizer.from_folder(folder).chat_templates)

        assert found() == {}
        named = [{"name": "default", "template": "a"}, {"name": "rag", "template": "r"}]
        _write(folder, "tokenizer_config.json", chat_template=named)
        assert found() == {"default": "a", "rag": "r"}
        _write(folder, "chat_template.json", chat_template="b")
        assert found() == {"default": "b", "rag": "r"}
        (folder / "chat_template.jinja").write_text("c", "utf-8")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("t", "utf-8")
        assert found() == {"default": "c", "rag": "r", "tool_use": "t"}

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFormatError) as caught:
            Tokenizer.from_folder(tmp_path)
        assert str(tmp_path) in caught.value.message
        assert "tokenizer.json" in caught.value.message

    @pytest.mark.parametrize(
        ("name", "content", "says"),
        [
            ("tokenizer_config.json", '{"add_bos_token": true, "bos_token": "<none>"}', "'<none>', which"),
            ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', "a name and a template"),
            ("tokenizer_config.json", '{"chat_template": [3]}', "a name and a template"),
            ("generation_config.json", '{"eos_token_id": ["2"]}', "expected a token's id"),
            ("config.json", '{"eos_token_id": {"a": 1}}', "expected a token's id"),
        ],
    )
    def test_a_setting_of_the_wrong_kind(self, folder: Path, name: str, content: str, says: str) -> None:
        (folder / name).write_text(content, "utf-8")
        if name == "config.json":
            (folder / "generation_config.json").unlink(missing_ok=True)
        with pytest.raises(ModelFormatError, match=says):
            Tokenizer.from_folder(folder)

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
    @pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
    def test_damaged_file_is_named(self, folder: Path, name: str, content: str) -> None:
        (folder / name).write_text(content, "utf-8")
        with pytest.raises(ModelFormatError, match=name):
            Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "decoder",
    [
        lambda: decoders.Metaspace(),
        lambda: decoders.Metaspace(prepend_scheme="never"),
        lambda: decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    ],
)
def test_decodes_as_the_backend_does(tmp_path: Path, decoder: Callable[[], Any]) -> None:
    tokens = ["▁hello", "▁", "w", "▁world", "<0xC5>", "<0x99>", "<s>"]
    backend = tokenizers.Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, []))
    backend.decoder = decoder()
    backend.add_special_tokens([AddedToken("<s>")])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    for ids in ([0, 3], [3], [6, 0], [1, 2], [2, 1, 3], []):
        assert tokenizer.decode(ids) == backend.decode(ids)
    if "ByteFallback" in str(decoder().__getstate__()):
        assert tokenizer.decode([0, 4, 5]) == backend.decode([0, 4, 5]) == " helloř"


def test_encode_from_many_threads() -> None:
    tokenizer = bpe()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(tokenizer.encode, CORPUS * 20))
    assert answers == [tokenizer.encode(text) for text in CORPUS] * 20


@pytest.mark.model
def test_default_model() -> None:
    """Against the tokenizer that the model was trained with, rebuilt from the stock classes."""
    from emlxd.graph.gguf import GgufFile

    cache = Path(os.environ.get("EMLXD_CACHE", Path.home() / ".cache" / "emlxd"))
    path = next(cache.rglob("SmolLM2-135M-Instruct.Q4_1.gguf"), None)
    if path is None:
        pytest.skip(f"the default model is not in {cache}")
    metadata = GgufFile(path).metadata
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {token: id for id, token in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in merges]
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token) for token in tokens[:17]])
    tokenizer = Tokenizer.from_gguf(metadata)
    for text in CORPUS:
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids
        assert tokenizer.decode(ids) == backend.decode(ids)
    assert tokenizer.special_ids == set(range(17))
    assert tokenizer.id_of("<|im_end|>") in tokenizer.eos_ids


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """The event loop is one of them: all streams would stand still."""
    tokenizer, text = bpe(), "hello world " * 300_000
    ping: Queue[None] = Queue()
    pong: Queue[None] = Queue()

    def echo() -> None:
        for _ in range(300):
            pong.put(ping.get())

    with ThreadPoolExecutor(2) as threads:
        threads.submit(echo)
        encoding = threads.submit(tokenizer.encode, text)
        for _ in range(300):  # each takes its turn at the interpreter
            ping.put(None)
            pong.get()
        assert not encoding.done()
        assert len(encoding.result()) >= 600_000
