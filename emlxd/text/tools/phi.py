"""Phi-4-mini: an array between marks."""

from __future__ import annotations

from emlxd.text.tools.arrays import Arrays

PHI = Arrays("phi", "<|tool_call|>", "<|/tool_call|>")
