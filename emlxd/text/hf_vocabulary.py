"""A tokenizer from a Hugging Face model folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from emlxd.errors import ModelFormatError
from emlxd.json_files import read_object
from emlxd.text.vocabulary import Vocabulary, add_bos_and_eos


def load(folder: Path) -> Vocabulary:
    """Raises ModelFormatError if tokenizer.json is missing or a file in ``folder`` is damaged."""
    config = read_object(folder / "tokenizer_config.json")
    backend = _read_backend(folder)
    specials = {
        **_special_tokens(read_object(folder / "special_tokens_map.json")),
        **_special_tokens(config),
    }
    bos, eos = specials.get("bos_token"), specials.get("eos_token")
    # Qwen's tokenizers ignore these settings: tokenizer.json says what is added.
    obeys = not str(config.get("tokenizer_class")).startswith("Qwen")
    if obeys and ("add_bos_token" in config or "add_eos_token" in config):
        _check_known(folder, backend, {"bos_token": bos, "eos_token": eos}, config)
        add_bos_and_eos(
            backend,
            bos if config.get("add_bos_token") else None,
            eos if config.get("add_eos_token") else None,
        )
    return Vocabulary(
        backend,
        bos_id=backend.token_to_id(bos) if bos else None,
        eos_ids=_end_ids(folder, backend.token_to_id(eos) if eos else None),
        special_tokens=specials,
        chat_templates=chat_templates(folder),
    )


def _check_known(
    folder: Path, backend: Backend, named: Mapping[str, str | None], config: Mapping[str, Any]
) -> None:
    """Raises ModelFormatError if a token that is to be added to each text is not in the vocabulary."""
    for name, token in named.items():
        if config.get(f"add_{name}") and token is not None and backend.token_to_id(token) is None:
            raise ModelFormatError(f"{folder}: {name} is {token!r}, which tokenizer.json does not have")


def _read_backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFormatError(f"{folder} has no tokenizer, expected the file tokenizer.json in it")
    try:
        backend = Backend.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # plain Exception, or a panic in Rust, which is not even that
        raise ModelFormatError(f"{path} is not a tokenizer that can be read: {error}") from error
    # Limits saved during training would cut prompts without a word.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Each ``*_token`` entry, written as a string or as an object with ``content``."""
    contents = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _end_ids(folder: Path, eos_id: int | None) -> frozenset[int]:
    """What the tokenizer calls EOS, and all that generation stops at (an id or a list of them)."""
    ids = read_object(folder / "generation_config.json").get("eos_token_id")
    if ids is None:
        config = read_object(folder / "config.json")
        inner = config.get("text_config")
        ids = config.get("eos_token_id", inner.get("eos_token_id") if isinstance(inner, dict) else None)
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(id, int) for id in listed):
        raise ModelFormatError(f"{folder}: eos_token_id is {ids!r}, expected a token's id or a list of them")
    return frozenset(listed if eos_id is None else [*listed, eos_id])


def chat_templates(folder: Path) -> dict[str, str]:
    """By name, the usual one as "default".

    Later sources win: tokenizer_config.json, chat_template.json, the .jinja files. Raises ModelFormatError.
    """
    files = ("tokenizer_config.json", "chat_template.json")
    sources = [read_object(folder / file).get("chat_template") for file in files]
    templates: dict[str, str] = {}
    for source in sources:
        if isinstance(source, str):
            templates["default"] = source
        elif isinstance(source, list):
            templates |= dict(_named_template(folder, entry) for entry in source)
    main = folder / "chat_template.jinja"
    if main.is_file():
        templates["default"] = main.read_text("utf-8")
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[path.stem] = path.read_text("utf-8")
    return templates


def _named_template(folder: Path, entry: Any) -> tuple[str, str]:
    match entry:
        case {"name": str(name), "template": str(template)}:
            return name, template
    raise ModelFormatError(f"{folder}: expected a name and a template in the chat template {entry!r:.80}")
