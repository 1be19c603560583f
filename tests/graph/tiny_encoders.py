"""Tiny encoders with weights that follow from their names, and what Transformers makes of them.

``tests/data/encoders.json`` has the latter. To write it anew, with torch and transformers 5.24 or later:

    python -m tests.graph.tiny_encoders
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

DATA: Final = Path(__file__).parent.parent / "data" / "encoders.json"
TEXTS: Final = ([5, 17, 3, 29, 8], [9, 2, 33, 7, 7, 12, 40, 21, 6, 30, 11], [4])
PAIR: Final = ([5, 17, 3, 29, 8, 22, 10], 4)  # the second text begins at token 4

_SMALL: Final[dict[str, Any]] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "bert": _SMALL | {"model_type": "bert"},
    "roberta": _SMALL | {"model_type": "roberta", "type_vocab_size": 1},
    "xlm-roberta": _SMALL | {"model_type": "xlm-roberta", "type_vocab_size": 1, "hidden_act": "gelu_new"},
    "camembert": _SMALL | {"model_type": "camembert", "type_vocab_size": 1},
    "mpnet": _SMALL | {"model_type": "mpnet", "max_position_embeddings": 66},
    "distilbert": {
        "model_type": "distilbert",
        "vocab_size": 48,
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 40,
        "max_position_embeddings": 64,
    },
    "modernbert": _SMALL
    | {
        "model_type": "modernbert",
        "num_hidden_layers": 4,
        "local_attention": 4,
        "classifier_pooling": "mean",
    },
    "nomic_bert": _SMALL | {"model_type": "nomic_bert"},
}


def write_encoder(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> Path:
    """A folder with ``config`` and a tensor for each of ``shapes``."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight(name, shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def weight(name: str, shape: list[int]) -> NDArray[np.float32]:
    values = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape) * 0.3
    scales = len(shape) == 1 and name.endswith("weight")
    return (values + (1.0 if scales else 0.0)).astype(np.float32)


def _references() -> dict[str, Any]:
    """For each config: shapes of the tensors as published, hidden states of ``TEXTS``, a pair's score."""
    return {
        name: {"embedding": _hidden(config), "rerank": None if name == "nomic_bert" else _score(config)}
        for name, config in CONFIGS.items()
    }


def _hidden(config: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoModel

    with tempfile.TemporaryDirectory() as scratch:
        config, shapes = _rewritten(AutoModel, config, Path(scratch))
        model = AutoModel.from_pretrained(scratch, attn_implementation="eager").eval()
    longest = max(map(len, TEXTS))
    with torch.no_grad():
        states = model(
            input_ids=torch.tensor([text + [1] * (longest - len(text)) for text in TEXTS]),
            attention_mask=torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t in TEXTS]),
        ).last_hidden_state
    hidden = [_rounded(row[: len(text)]) for row, text in zip(states, TEXTS, strict=True)]
    return {"config": config, "shapes": shapes, "hidden": hidden}


def _score(config: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForSequenceClassification

    with tempfile.TemporaryDirectory() as scratch:
        config, shapes = _rewritten(
            AutoModelForSequenceClassification, config | {"num_labels": 1}, Path(scratch)
        )
        model = AutoModelForSequenceClassification.from_pretrained(
            scratch, attn_implementation="eager"
        ).eval()
    tokens, second_at = PAIR
    inputs = {"input_ids": torch.tensor([tokens])}
    if config.get("type_vocab_size") == 2:
        inputs["token_type_ids"] = torch.tensor([[int(i >= second_at) for i in range(len(tokens))]])
    with torch.no_grad():
        score = torch.sigmoid(model(**inputs).logits)
    return {"config": config, "shapes": shapes, "score": round(float(score), 6)}


def _rewritten(
    kind: Any, config: dict[str, Any], folder: Path
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Saved by Transformers, then with our weights in place of its own."""
    from safetensors.numpy import load_file
    from transformers import AutoConfig

    kind.from_config(AutoConfig.for_model(**config)).save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    shapes = {name: list(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    write_encoder(folder, saved, shapes)
    return saved, shapes


def _rounded(states: Any) -> list[list[float]]:
    return [[round(float(value), 5) for value in row] for row in states]


if __name__ == "__main__":
    DATA.write_text(json.dumps(_references(), separators=(",", ":")) + "\n")
    sys.stdout.write(f"{DATA} written\n")
