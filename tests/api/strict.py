"""Validation that OpenAI's client leaves out: it keeps unknown fields and does not say so."""

from __future__ import annotations

from pydantic import BaseModel


def assert_known_fields(value: object) -> None:
    """No object inside ``value`` has a field that its published type does not have."""
    if isinstance(value, BaseModel):
        assert not value.model_extra, f"{type(value).__name__} has unknown fields {value.model_extra}"
        for name in value.model_fields_set:
            assert_known_fields(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            assert_known_fields(item)
