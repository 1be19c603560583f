"""What a tokenizer is made of, whichever kind of model files it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer as Backend
from tokenizers import processors


@dataclass(frozen=True)
class Vocabulary:
    """A loaded backend and the facts about it that its own file does not hold.

    ``special_tokens`` are the named ones, such as ``{"bos_token": "<s>"}``; ``chat_templates`` map
    a name ("default" is the main one) to Jinja source.
    """

    backend: Backend
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)


def add_bos_and_eos(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Make ``backend`` put ``bos`` before every text and ``eos`` after it, each if given."""
    template = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    specials = [(token, backend.token_to_id(token)) for token in (bos, eos) if token]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)
