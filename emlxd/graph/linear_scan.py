"""Recurrences of linear attention, in chunks of tokens that are computed at once.

    S_t = g_t S_(t-1) + u_t k_t^T        y_t = S_t q_t

The delta rule writes what its state does not say yet: u_t = beta_t (v_t - g_t S_(t-1) k_t). Within a chunk
these u are the solution of a triangular system (Yang et al. 2024, Parallelizing Linear Transformers with the
Delta Rule over Sequence Length).

Shapes: B rows, L tokens, G key heads of Dk, H value heads of Dv, of which H / G neighbours share a key head.
All is float32. Chunks are laid out as [B, G, H / G, chunks, C, ...].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from emlxd.graph.recurrent_spec import CHUNK

Unary = Callable[[mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class Tokens:
    """What the recurrence takes: q and k [B, L, G, Dk], v [B, L, H, Dv], log g and beta [B, L, H].

    Without ``beta`` u is v.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    log_decay: mx.array
    beta: mx.array | None = None

    def first(self, lengths: mx.array | None) -> Tokens:
        """Tokens past a row's first ``lengths`` leave the state as it is.

        With one token a row nothing changes: rows without a token keep their state in any case.
        """
        if lengths is None or self.q.shape[1] == 1:
            return self
        there = mx.arange(self.q.shape[1], dtype=mx.int32) < lengths[:, None]
        log_decay = mx.where(there[..., None], self.log_decay, 0.0)
        if self.beta is None:
            v = mx.where(there[..., None, None], self.v, 0.0)
            return Tokens(self.q, self.k, v, log_decay)
        return Tokens(self.q, self.k, self.v, log_decay, mx.where(there[..., None], self.beta, 0.0))


def scan(tokens: Tokens, state: mx.array, exp: Unary = mx.exp) -> tuple[mx.array, mx.array]:
    """The outputs [B, L, H, Dv] and the state after the last token; ``state`` is [B, H, Dv, Dk]."""
    batch, length, groups, _ = tokens.q.shape
    grouped = state.reshape(batch, groups, -1, *state.shape[-2:])
    if length == 1:
        out, grouped = _step(tokens, grouped)
    else:
        out, grouped = _chunks(tokens, grouped, exp)
    return out, grouped.reshape(state.shape)


def _step(tokens: Tokens, state: mx.array) -> tuple[mx.array, mx.array]:
    """One token: the old state is read once, for q and k together."""
    batch, groups, shared, value_dim, key_dim = state.shape
    q, k = (x.reshape(batch, groups, 1, key_dim) for x in (tokens.q, tokens.k))
    v = tokens.v.reshape(batch, groups, shared, value_dim)
    decay = mx.exp(tokens.log_decay).reshape(batch, groups, shared, 1)
    found = state @ mx.stack([q, k], axis=-1)
    u = v
    if tokens.beta is not None:
        u = tokens.beta.reshape(decay.shape) * (v - decay * found[..., 1])
    out = decay * found[..., 0] + u * (q * k).sum(axis=-1, keepdims=True)
    return out.reshape(tokens.v.shape), decay[..., None] * state + u[..., None] * k[..., None, :]


def _chunks(tokens: Tokens, state: mx.array, exp: Unary) -> tuple[mx.array, mx.array]:
    batch, length, heads, value_dim = tokens.v.shape
    size = min(CHUNK, length)
    groups, shared = state.shape[1:3]

    def cut(x: mx.array, heads_in_group: int) -> mx.array:
        """[B, L, heads, ...] -> [B, G, heads / G, chunks, C, ...], filled up with zeros."""
        x = mx.pad(x, [(0, 0), (0, -length % size), *[(0, 0)] * (x.ndim - 2)])
        x = x.reshape(batch, -1, size, groups, heads_in_group, *x.shape[3:])
        return x.transpose(0, 3, 4, 1, 2, *range(5, x.ndim))

    q, k, v = cut(tokens.q, 1), cut(tokens.k, 1), cut(tokens.v, shared)
    total = mx.cumsum(cut(tokens.log_decay, shared), axis=-1)  # log of the decay since the chunk's beginning
    since = exp(total)[..., None]
    at = mx.arange(size)
    between = mx.where(at[:, None] >= at, exp(mx.minimum(total[..., None] - total[..., None, :], 0.0)), 0.0)
    until_end = exp(total[..., -1:] - total)[..., None]
    seen = (q @ k.swapaxes(-1, -2)) * between
    looking = q * since
    if tokens.beta is not None:
        beta = cut(tokens.beta, shared)[..., None]
        known = mx.where(at[:, None] > at, beta * (k @ k.swapaxes(-1, -2)) * between, 0.0)
        solve = _inverse_of_one_plus(known)
        v, looking = solve @ (beta * v), mx.concatenate([looking, solve @ (beta * k * since)], axis=-2)
    keys = k * until_end
    outs = []
    for n in range(v.shape[3]):
        found = looking[:, :, :, n] @ state.swapaxes(-1, -2)
        u = v[:, :, :, n] if tokens.beta is None else v[:, :, :, n] - found[..., size:, :]
        outs.append(found[..., :size, :] + seen[:, :, :, n] @ u)
        state = since[:, :, :, n, -1:] * state + u.swapaxes(-1, -2) @ keys[:, :, :, n]
    out = mx.stack(outs, axis=3).transpose(0, 3, 4, 1, 2, 5)
    return out.reshape(batch, -1, heads, value_dim)[:, :length], state


def _inverse_of_one_plus(lower: mx.array) -> mx.array:
    """(1 + A)^-1 of strictly lower triangular A [..., C, C], of its blocks of 1, 2, 4 ... rows in turn.

    [[P, 0], [R, Q]]^-1 = [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]]
    """
    size = lower.shape[-1]
    inverse = mx.eye(size)
    rows = 1
    while rows < size:
        block = mx.arange(size) // rows
        left_below = (block[:, None] == block + 1) & (block % 2 == 0)
        part = mx.where(left_below, lower, 0.0)
        inverse = inverse - (part if rows == 1 else inverse @ part @ inverse)
        rows *= 2
    return inverse
