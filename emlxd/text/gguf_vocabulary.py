"""A tokenizer from the key/values of a GGUF file (``tokenizer.ggml.*``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from emlxd.errors import ModelFormatError
from emlxd.text.pretokenizer import PRE_TOKENIZERS
from emlxd.text.vocabulary import Vocabulary, add_bos_and_eos

_SPACE = "\u2581"
_PREFIX = "tokenizer.ggml."
_NAMED = ("bos", "eos", "unknown", "separator", "padding", "mask")
_TEMPLATE_NAMES = {"unknown": "unk", "separator": "sep", "padding": "pad"}

# Files often name one end token where the model was trained with several.
_END_OF_TURN = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"}
)


class _Type(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def load(metadata: Mapping[str, Any]) -> Vocabulary:
    """Raises ModelFormatError for a tokenizer that is missing, damaged or of an unknown kind."""
    try:
        return _load(metadata)
    except ModelFormatError:
        raise
    except Exception as error:  # values can be of any type, and the backend raises plain Exception
        raise ModelFormatError(f"GGUF tokenizer metadata is damaged: {error}") from error


def _load(metadata: Mapping[str, Any]) -> Vocabulary:
    model = _required(metadata, "model", str)
    if model not in _MODELS:
        raise ModelFormatError(
            f"GGUF tokenizer model '{model}' is not supported; supported: {', '.join(_MODELS)}"
        )
    tokens = _required(metadata, "tokens", list)
    types = metadata.get(_PREFIX + "token_type") or [_Type.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelFormatError(
            f"GGUF token_type has {len(types)} entries, expected {len(tokens)}, one a token"
        )
    named = _named_tokens(metadata, tokens, _DEFAULT_IDS.get(model, {}))
    backend, add_bos = _MODELS[model](metadata, tokens, types)
    _add_marked_tokens(backend, tokens, types)
    _set_bos_and_eos(backend, metadata, tokens, named, add_bos)
    return Vocabulary(
        backend,
        bos_id=named.get("bos"),
        eos_ids=_end_ids(metadata, tokens, types, named),
        special_tokens={f"{_TEMPLATE_NAMES.get(name, name)}_token": tokens[id] for name, id in named.items()},
        chat_templates=chat_templates(metadata),
    )


def _byte_level_bpe(
    metadata: Mapping[str, Any], tokens: list[str], _types: list[int]
) -> tuple[Backend, bool]:
    """The backend, and whether it starts a text with BOS when the file does not say."""
    name = metadata.get(_PREFIX + "pre", "default")
    kind = PRE_TOKENIZERS.get(name)
    if kind is None:
        raise ModelFormatError(
            f"GGUF pre-tokenizer '{name}' is not known; known: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    merges = [_split_merge(merge) for merge in _required(metadata, "merges", list)]
    backend = Backend(models.BPE(_ids(tokens), merges, ignore_merges=kind.ignore_merges))
    if kind.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = kind.build()
    backend.decoder = decoders.ByteLevel()
    return backend, kind.add_bos


def _sentencepiece_bpe(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tuple[Backend, bool]:
    """SentencePiece's BPE ranks merges by the score of what they make."""
    scores = _required(metadata, "scores", list)
    if len(scores) != len(tokens):
        raise ModelFormatError(f"GGUF scores has {len(scores)} entries, expected {len(tokens)}, one a token")
    unknown = next((token for token, type in zip(tokens, types, strict=True) if type == _Type.UNKNOWN), None)
    backend = Backend(
        models.BPE(
            _ids(tokens),
            _merges_by_score(tokens, types, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix_space = metadata.get(_PREFIX + "add_space_prefix", True)
    prepend = [normalizers.Prepend(_SPACE)] if prefix_space else []
    strip = [decoders.Strip(" ", 1, 0)] if prefix_space else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend, True


_MODELS: Mapping[str, Callable[[Mapping[str, Any], list[str], list[int]], tuple[Backend, bool]]] = (
    MappingProxyType({"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe})
)
_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {"llama": {"unknown": 0, "bos": 1, "eos": 2}}
)


def _ids(tokens: list[str]) -> dict[str, int]:
    """The first of several equal tokens is the one that text becomes."""
    return {token: id for id, token in reversed(list(enumerate(tokens)))}


def _split_merge(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)
    if cut < 0:
        raise ModelFormatError(f"GGUF merge {merge!r} has no space, expected 'left right'")
    return merge[:cut], merge[cut + 1 :]


def _merges_by_score(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    mergeable = {
        token: score for token, type, score in zip(tokens, types, scores, strict=True) if type == _Type.NORMAL
    }
    merges = [
        (-score, token[:cut], token[cut:])
        for token, score in mergeable.items()
        for cut in range(1, len(token))
        if token[:cut] in mergeable and token[cut:] in mergeable
    ]
    merges.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in merges]


def _add_marked_tokens(backend: Backend, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special; user-defined ones are matched whole but are text."""
    marked = list(zip(tokens, types, strict=True))
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, type in marked
            if type in (_Type.CONTROL, _Type.UNKNOWN)
        ]
    )
    backend.add_tokens(
        [AddedToken(token, normalized=False) for token, type in marked if type == _Type.USER_DEFINED]
    )


def _set_bos_and_eos(
    backend: Backend,
    metadata: Mapping[str, Any],
    tokens: list[str],
    named: Mapping[str, int],
    add_bos: bool,
) -> None:
    def token(name: str, default: bool) -> str | None:
        wanted = metadata.get(f"{_PREFIX}add_{name}_token", default)
        return tokens[named[name]] if wanted and name in named else None

    add_bos_and_eos(backend, token("bos", add_bos), token("eos", False))


def _end_ids(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], named: Mapping[str, int]
) -> frozenset[int]:
    ids = {named.get("eos"), _id(metadata, "eot", tokens), _id(metadata, "eom", tokens)} - {None}
    by_name = {
        id
        for id, (token, type) in enumerate(zip(tokens, types, strict=True))
        if type == _Type.CONTROL and token in _END_OF_TURN
    }
    return frozenset(ids | by_name)  # type: ignore[arg-type]


def _named_tokens(
    metadata: Mapping[str, Any], tokens: list[str], defaults: Mapping[str, int]
) -> dict[str, int]:
    ids = {name: _id(metadata, name, tokens, defaults.get(name)) for name in _NAMED}
    return {name: id for name, id in ids.items() if id is not None}


def _id(metadata: Mapping[str, Any], name: str, tokens: list[str], default: int | None = None) -> int | None:
    id: int | None = metadata.get(f"{_PREFIX}{name}_token_id", default)
    if id is not None and not 0 <= id < len(tokens):
        raise ModelFormatError(f"GGUF {name}_token_id is {id}, but there are {len(tokens)} tokens")
    return id


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """By name, the usual one as "default"."""
    key = "tokenizer.chat_template"
    named = {name[len(key) + 1 :]: text for name, text in metadata.items() if name.startswith(key + ".")}
    return {"default": metadata[key], **named} if key in metadata else named


def _required(metadata: Mapping[str, Any], name: str, type: type[Any]) -> Any:
    value = metadata.get(_PREFIX + name)
    if not isinstance(value, type):
        raise ModelFormatError(f"GGUF metadata has no usable '{_PREFIX}{name}', expected a {type.__name__}")
    return value
