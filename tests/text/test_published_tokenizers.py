"""Real tokenizers and chat templates: what Transformers makes of the same files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from emlxd.text.chat_template import ChatTemplate
from emlxd.text.detokenizer import Detokenizer
from emlxd.text.tokenizer import Tokenizer
from tests.text.published import NAMES, folder_of

CORPUS = (
    "The quick brown fox jumps over the lazy dog, 3.14159 times in 2024!",
    "  leading, trailing and  double   spaces \n\n\ttabs\r\n",
    "Größe, naïveté, coöperate, Ünïcödé; é is not é",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "敏捷的棕色狐狸跳过了懒狗。東京都は日本の首都です。",
    "다람쥐 헌 쳇바퀴에 타고파",
    "كل البشر يولدون أحرارًا ومتساوين في الكرامة",
    "כל בני האדם נולדו בני חורין",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में",
    "ทุกคนเกิดมาอิสระ",
    "👩\u200d👩\u200d👧 🏳️\u200d🌈 🇨🇿 e\u0301 \u200b\ufeff zero width",
    "def f(x: int) -> str:\n    return f'{x!r:>10}' if x else \"\"  # comment\n",
    "https://example.org/a?b=c&d=%20 <|im_start|>user<|im_end|> <s> </s>",
    "1234567 12 345 0x1F 1e-10 ½ ² Ⅳ",
    "I'm you've SHE'LL don't 'tis",
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "How it is in a place: 'now' or \"later\" <b>",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "enum": ["Zürich", "東京"]},
                    "days": {"type": "integer"},
                },
                "required": ["place"],
            },
        },
    }
]
CHAT = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Hi! Größe? 東京"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "  And now?\n"},
]


@dataclass(frozen=True)
class Pair:
    folder: Path
    ours: Tokenizer
    theirs: Any

    @property
    def template(self) -> ChatTemplate:
        if "default" not in self.ours.chat_templates:
            pytest.skip("the package has no chat template")
        return ChatTemplate(self.ours.chat_templates["default"], self.ours.special_tokens)


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest) -> Pair:
    folder = folder_of(request.param)
    return Pair(folder, Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder))


def test_texts_become_the_same_tokens_and_come_back(pair: Pair) -> None:
    for text in CORPUS:
        ids = pair.ours.encode(text, add_special_tokens=False)
        assert ids == pair.theirs.encode(text, add_special_tokens=False), text
        detokenizer = Detokenizer(pair.ours, keep=pair.ours.special_ids)
        assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == pair.ours.decode(
            ids, skip_special_tokens=False
        )
        back = pair.theirs.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert pair.ours.decode(ids, skip_special_tokens=False) == back


def test_special_tokens_are_the_same(pair: Pair) -> None:
    """``add_bos_token`` counts, which Transformers' generic class, that reads all of these, does not know."""
    asked = json.loads((pair.folder / "tokenizer_config.json").read_text()).get("add_bos_token")
    begins = asked if asked is not None else bool(pair.theirs.encode(""))
    bos = [pair.theirs.bos_token_id] if begins else []
    assert pair.ours.encode("Hi") == bos + pair.theirs.encode("Hi", add_special_tokens=False)
    assert pair.ours.eos_ids == {pair.theirs.eos_token_id}


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("begins", [True, False])
def test_conversations_are_written_as_transformers_writes_them(
    pair: Pair, tools: list[Any] | None, begins: bool
) -> None:
    ours = pair.template.render(CHAT, add_generation_prompt=begins, tools=tools)
    theirs = pair.theirs.apply_chat_template(CHAT, tools=tools, add_generation_prompt=begins, tokenize=False)
    assert ours == theirs
