"""What models' files say of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from mlx.utils import tree_flatten

from emlxd.config import ModelSettings, Source
from emlxd.description import describe, describe_all
from emlxd.sources import locate
from tests.daemon import DEFAULT_SOURCE
from tests.graph import tiny

DEFAULT = Source.model_validate(DEFAULT_SOURCE)
PLAIN = "{{ messages }}"


def entry(path: Path, **more: Any) -> ModelSettings:
    return ModelSettings(name=path.name, source=Source(path=path), **more)


@pytest.mark.parametrize("bits", [None, 4])
def test_a_folder(tmp_path: Path, bits: int | None) -> None:
    model, config = tiny.make_llama()
    parameters = sum(array.size for _, array in tree_flatten(model.parameters()))
    if bits:
        config = tiny.quantize(model, config, bits=bits)
    path = tiny.save(tmp_path / "tiny", model, config)
    (path / "chat_template.jinja").write_text("{% if x %}<think></think>{% endif %}")
    card = describe(entry(path, max_context=256))
    assert card is not None
    assert (card.kind, card.format, card.architecture) == ("chat", "safetensors", "llama")
    assert (card.parameters, card.quantization) == (parameters, "4-bit" if bits else "F32")
    assert card.nbytes == sum(file.stat().st_size for file in path.iterdir())
    assert (card.max_context, card.thinks) == (256, True)
    (path / "chat_template.jinja").write_text(PLAIN)
    changed = describe(entry(path))
    assert changed is not None
    assert (changed.template, changed.thinks, changed.max_context) == (PLAIN, False, 512)
    assert changed.digest != card.digest and len(changed.digest) == 64
    os.utime(path / "config.json", ns=(1, 2))
    assert describe(entry(path)).digest != changed.digest  # type: ignore[union-attr]


def test_what_a_model_is_for(tmp_path: Path) -> None:
    path = tiny.save(tmp_path / "tiny", *tiny.make_llama())
    card = describe(entry(path, kind="embedding"))
    assert card is not None and card.kind == "embedding"
    (path / "modules.json").write_text("[]")
    found = describe(entry(path))
    assert found is not None and found.kind == "embedding"


def test_those_without_files_and_the_damaged_are_left_out(tmp_path: Path) -> None:
    good = tiny.save(tmp_path / "good", *tiny.make_llama())
    damaged = tiny.save(tmp_path / "damaged", *tiny.make_llama())
    (damaged / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    paths = [tmp_path / "gone", damaged, good]
    assert list(describe_all(map(entry, paths))) == ["good"]


@pytest.mark.model
@pytest.mark.skipif(locate(DEFAULT) is None, reason="the default model is not in the cache")
def test_a_gguf_file() -> None:
    card = describe(ModelSettings(name="m", source=DEFAULT))
    path = locate(DEFAULT)
    assert card is not None and path is not None
    assert (card.format, card.architecture, card.quantization) == ("gguf", "llama", "Q4_1")
    assert (card.parameters, card.max_context) == (134_515_008, 8192)
    assert (card.nbytes, card.digest) == (path.stat().st_size, DEFAULT.sha256)
    assert "<|im_start|>" in card.template
