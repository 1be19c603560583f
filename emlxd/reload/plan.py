"""What must change to get from one configuration to another, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final

from emlxd.config import ModelSettings, Settings

RETUNABLE: Final = frozenset(
    {"aliases", "max_queue", "stream_chunks", "sampling", "load", "required", "idle_unload", "pinned"}
    | {"priority", "load_timeout", "request_timeout"}
)
"""What may change while a model stays loaded. Anything else means loading it anew."""

NEEDS_RESTART: Final = frozenset({"server.host", "server.port", "tracing.endpoint"})

_SECTIONS: Final = ("server", "memory", "metrics", "log", "tracing")


@dataclass(frozen=True, slots=True)
class Plan:
    """Names of models, and dotted names of settings outside of them."""

    keep: tuple[str, ...] = ()
    retune: tuple[str, ...] = ()
    replace: tuple[str, ...] = ()
    add: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether nothing changes."""
        return not any(getattr(self, field.name) for field in fields(self) if field.name != "keep")

    def as_dict(self) -> dict[str, list[str]]:
        return {field.name: list(getattr(self, field.name)) for field in fields(self)}


def plan(old: Settings, new: Settings) -> Plan:
    """The way from ``old`` to ``new``. Models are the same if their names are."""
    before = {model.name: model for model in old.models}
    after = {model.name: model for model in new.models}
    changes = {name: _changed(before[name], model) for name, model in after.items() if name in before}
    settings = list(_changed_settings(old, new))
    return Plan(
        keep=tuple(name for name, changed in changes.items() if not changed),
        retune=tuple(name for name, changed in changes.items() if changed and changed <= RETUNABLE),
        replace=tuple(name for name, changed in changes.items() if changed - RETUNABLE),
        add=tuple(name for name in after if name not in before),
        drop=tuple(name for name in before if name not in after),
        settings=tuple(name for name in settings if name not in NEEDS_RESTART),
        needs_restart=tuple(name for name in settings if name in NEEDS_RESTART),
    )


def _changed(old: ModelSettings, new: ModelSettings) -> set[str]:
    return set(_unequal(old, new))


def _changed_settings(old: Settings, new: Settings) -> Iterator[str]:
    # `defaults` are in the models already.
    for section in _SECTIONS:
        for name in _unequal(getattr(old, section), getattr(new, section)):
            yield f"{section}.{name}"


def _unequal(old: Any, new: Any) -> Iterator[str]:
    for name in type(new).model_fields:
        if getattr(old, name) != getattr(new, name):
            yield name
