"""Attention with a key and a value for every head or group of heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from emlxd.graph.attention import Scoring, read
from emlxd.graph.layers import HeadNorm, Linear, Norm, Parallel
from emlxd.graph.rope import Rope
from emlxd.graph.step_context import StepContext


@dataclass(frozen=True, slots=True)
class AllHeadsNorm:
    """Normalises all queries of a token together, and all its keys."""

    queries: Norm
    keys: Norm
    heads: int

    def __call__(self, qk: mx.array) -> mx.array:
        """[B, L, heads + kv_heads, head_dim] -> the same"""
        parts = mx.split(qk, [self.heads], axis=2)
        normed = [
            norm(part.flatten(-2)).reshape(part.shape)
            for norm, part in zip((self.queries, self.keys), parts, strict=True)
        ]
        return mx.concatenate(normed, axis=2)


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """``rope``, ``window``, ``ring`` and ``values_are_keys`` as in ``LayerSpec``.

    ``gated`` as ``ModelSpec.attention_gate``; ``value_eps`` is that of its ``value_norm``.
    """

    qkv: Parallel
    out: Linear
    heads: int
    kv_heads: int
    head_dim: int
    norm: HeadNorm | AllHeadsNorm | None
    rope: Rope | None
    window: int | None
    ring: int | None
    scoring: Scoring
    gated: bool = False
    values_are_keys: bool = False
    value_eps: float | None = None

    def __call__(self, x: mx.array, step: StepContext, kept: Sequence[mx.array]) -> mx.array:
        keys, values = kept
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, -1, self.head_dim)
        if self.values_are_keys:
            qk, v, gate = qkv, qkv[:, :, self.heads :], []
        else:
            qk, v, *gate = mx.split(qkv, self._ends, axis=2)
        if self.value_eps is not None:
            v = mx.fast.rms_norm(v, None, self.value_eps)
        if self.norm is not None:
            qk = self.norm(qk)
        if self.rope is not None:
            qk = step.rotate(self.rope, qk)
        q, k = mx.split(qk, [self.heads], axis=2)
        if step.query_scale is not None:
            q = q * step.query_scale.astype(q.dtype)
        step.write(keys, k.swapaxes(1, 2), self.ring)
        step.write(values, v.swapaxes(1, 2), self.ring)
        k, v = read(keys, step.place, self.ring), read(values, step.place, self.ring)
        out = step.attend(q.swapaxes(1, 2), k, v, self.window, self.scoring)
        out = out.swapaxes(1, 2)
        if gate:
            out = out * mx.sigmoid(gate[0])
        return self.out(out.reshape(batch, length, -1))

    @property
    def _ends(self) -> list[int]:
        """Where queries with keys, and values, end among the heads that are computed together."""
        keys, values = self.heads + self.kv_heads, self.heads + 2 * self.kv_heads
        return [keys, values] if self.gated else [keys]


@dataclass(frozen=True, slots=True)
class BorrowingAttention:
    """Queries alone: keys and values are those that another layer has written in this step and before."""

    queries: Parallel
    out: Linear
    head_dim: int
    norm: HeadNorm | None
    rope: Rope | None
    window: int | None
    ring: int | None
    scoring: Scoring

    def __call__(self, x: mx.array, step: StepContext, kept: Sequence[mx.array]) -> mx.array:
        """``kept`` is what the other layer keeps."""
        keys, values = kept
        batch, length, _ = x.shape
        q = self.queries(x).reshape(batch, length, -1, self.head_dim)
        if self.norm is not None:
            q = self.norm(q)
        if self.rope is not None:
            q = step.rotate(self.rope, q)
        k, v = read(keys, step.place, self.ring), read(values, step.place, self.ring)
        out = step.attend(q.swapaxes(1, 2), k, v, self.window, self.scoring)
        return self.out(out.swapaxes(1, 2).reshape(batch, length, -1))
