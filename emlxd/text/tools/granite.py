"""Granite 3: an array after ``<|tool_call|>``. Granite 4 writes like Hermes."""

from __future__ import annotations

from emlxd.text.tools.arrays import Arrays

GRANITE = Arrays("granite", "<|tool_call|>")
