"""How a GGUF file's byte-level BPE cuts text before merging, by the name in ``tokenizer.ggml.pre``.

Each row is what the model's own tokenizer does: a list of patterns, applied one after the other,
whose matches become pieces of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True)
class PreTokenizer:
    """``ignore_merges``: a piece that is a token stays whole. ``nfc``: text is composed first.
    ``add_bos``: whether a text starts with BOS when the file does not say."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, byte_level])


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PUNCTUATION_OR_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_DIGITS_BY_3 = r"\p{N}{1,3}"

_HEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LOWER_ENDED = f"{_HEAD}{_UPPER}*{_LOWER}+"
_UPPER_STARTED = f"{_HEAD}{_UPPER}+{_LOWER}*"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = f"{_CONTRACTION}|{_WORD}|{_DIGITS_BY_3}|{_PUNCTUATION}|{_SPACE}"
_QWEN2 = f"{_CONTRACTION}|{_WORD}|{_DIGIT}|{_PUNCTUATION}|{_SPACE}"
_QWEN35 = (
    f"{_CONTRACTION}|{_HEAD}[\\p{{L}}\\p{{M}}]+|{_DIGIT}| ?[^\\s\\p{{L}}\\p{{M}}\\p{{N}}]+[\\r\\n]*|{_SPACE}"
)
_TEKKEN = f"{_LOWER_ENDED}|{_UPPER_STARTED}|{_DIGIT}|{_PUNCTUATION_OR_SLASH}|{_SPACE}"
_GPT4O = (
    f"{_LOWER_ENDED}{_CONTRACTION}?|{_UPPER_STARTED}{_CONTRACTION}?"
    f"|{_DIGITS_BY_3}|{_PUNCTUATION_OR_SLASH}|{_SPACE}"
)
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}"
)
_CJK_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED_WORD = r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"
_WIDE_PUNCTUATION = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"

_DIGIT_GPT2 = PreTokenizer((_DIGIT, _GPT2))
_ROWS: tuple[tuple[tuple[str, ...], PreTokenizer], ...] = (
    (
        (
            "gpt-2",
            "gpt2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "exaone4",
            "trillion",
            "granite-docling",
        ),
        PreTokenizer((_GPT2,)),
    ),
    (
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        _DIGIT_GPT2,
    ),
    (("default",), PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    (("falcon",), PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    (
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    (("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    (("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"), PreTokenizer((_QWEN2,), nfc=True)),
    (("stablelm2", "hunyuan", "solar-open", "grok-2"), PreTokenizer((_QWEN2,))),
    (("qwen35",), PreTokenizer((_QWEN35,), nfc=True)),
    (("tekken",), PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    (("gpt-4o", "llama4", "kanana2", "minimax-m2"), PreTokenizer((_GPT4O,), ignore_merges=True)),
    (
        ("deepseek-llm",),
        PreTokenizer((r"[\r\n]", _CASED_WORD, _WIDE_PUNCTUATION, r"\s+$", _CJK_HANGUL, r"\p{N}+")),
    ),
    (("deepseek-coder",), PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_HANGUL, _DIGIT))),
    (
        ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
        PreTokenizer((_DIGITS_BY_3, _CJK_KANA, _DEEPSEEK3)),
    ),
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {name: kind for names, kind in _ROWS for name in names}
)
