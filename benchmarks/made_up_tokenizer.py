"""A tokenizer for models with random weights."""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from emlxd.bench.prompts import WORDS


def write_tokenizer(folder: Path) -> None:
    """Bytes, the words of prompts, and made-up ones up to the model's size: all are text, none an end."""
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    letters = itertools.product(string.ascii_lowercase, repeat=4)
    texts = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *WORDS, *(f"Ġ{word}" for word in WORDS)]
    made_up = ("Ġ" + "".join(word) for word in letters)
    vocabulary = dict.fromkeys(itertools.chain(texts, made_up))
    ids = {text: id for id, text in enumerate(itertools.islice(vocabulary, size))}
    tokenizer = Tokenizer(models.BPE(ids, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{{ messages[0]['content'] }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
