"""Multi-head latent attention: the cache holds one small vector a token, shared by all heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from emlxd.graph.attention import Scoring, read
from emlxd.graph.layers import Linear, Norm
from emlxd.graph.rope import Rope
from emlxd.graph.spec import LatentSpec
from emlxd.graph.step_context import StepContext


@dataclass(frozen=True, slots=True)
class Queries:
    """Queries of all heads, through a narrow layer where there is one."""

    down: Linear | None
    norm: Norm | None
    up: Linear

    def __call__(self, x: mx.array) -> mx.array:
        if self.down is not None and self.norm is not None:
            x = self.norm(self.down(x))
        return self.up(x)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """The keys kept are the latents [slots, 1, max_context, rank], the values their rotated part.

    ``key_up`` [H, rank, plain_dim] and ``value_up`` [H, value_dim, rank] expand a latent for each head. A
    single token is cheaper the other way round: its query is taken to the latents, and what it finds is
    expanded.
    """

    spec: LatentSpec
    queries: Queries
    down: Linear
    down_norm: Norm
    key_up: mx.array
    value_up: mx.array
    out: Linear
    heads: int
    rope: Rope
    scoring: Scoring

    def __call__(self, x: mx.array, step: StepContext, kept: Sequence[mx.array]) -> mx.array:
        keys, values = kept
        spec, (batch, length, _) = self.spec, x.shape
        q = self.queries(x).reshape(batch, length, self.heads, -1)
        if step.query_scale is not None:
            q = q * step.query_scale.astype(q.dtype)
        q, q_rope = mx.split(q, [spec.plain_dim], axis=-1)
        latent, k_rope = mx.split(self.down(x), [spec.rank], axis=-1)
        q_rope, k_rope = step.rotate(self.rope, q_rope), step.rotate(self.rope, k_rope[:, :, None])
        step.write(keys, self.down_norm(latent)[:, None])
        step.write(values, k_rope.swapaxes(1, 2))
        latents, k_rope = read(keys, step.place), read(values, step.place)
        bias = (q_rope.swapaxes(1, 2) * self.scoring.scale) @ k_rope.swapaxes(-1, -2)
        q = q.swapaxes(1, 2)
        if length == 1:
            found = step.attend(q @ self.key_up.swapaxes(-1, -2), latents, latents, None, self.scoring, bias)
            out = found @ self.value_up.swapaxes(-1, -2)
        else:
            k, v = latents @ self.key_up, latents @ self.value_up.swapaxes(-1, -2)
            out = step.attend(q, k, v, None, self.scoring, bias)
        return self.out(out.swapaxes(1, 2).reshape(batch, length, -1))
