"""A WordPiece tokenizer as BERT's folders have it, with single letters for words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

SPECIALS: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
CLS, SEP, A = 2, 3, 4  # ids; the letters follow a


def write_wordpiece(folder: Path, **config: Any) -> Path:
    """Writes tokenizer.json, and ``config`` as tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [*SPECIALS, *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordPiece({token: id for id, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"} | config))
    return folder
