"""Recurrences in chunks are the recurrences token by token."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from emlxd.graph.linear_scan import Tokens, scan
from tests.agreement import close

pytestmark = pytest.mark.numeric

ROWS, GROUPS, HEADS, KEY_DIM, VALUE_DIM = 2, 2, 6, 8, 5


def random_tokens(length: int, *, delta: bool = True) -> Tokens:
    mx.random.seed(length)
    q, k = (mx.random.normal((ROWS, length, GROUPS, KEY_DIM)) for _ in range(2))
    return Tokens(
        q=q,
        k=k / mx.linalg.norm(k, axis=-1, keepdims=True),
        v=mx.random.normal((ROWS, length, HEADS, VALUE_DIM)),
        log_decay=-mx.random.uniform(0, 0.2, (ROWS, length, HEADS)),
        beta=mx.random.uniform(0, 1, (ROWS, length, HEADS)) if delta else None,
    )


def token_by_token(tokens: Tokens, state: mx.array) -> tuple[mx.array, mx.array]:
    """The formulas of the module's head as they stand there."""
    outs = []
    for t in range(tokens.q.shape[1]):
        q, k = (mx.repeat(x[:, t], HEADS // GROUPS, axis=1)[..., None] for x in (tokens.q, tokens.k))
        state = mx.exp(tokens.log_decay[:, t])[..., None, None] * state
        u = tokens.v[:, t][..., None]
        if tokens.beta is not None:
            u = tokens.beta[:, t][..., None, None] * (u - state @ k)
        state = state + u @ k.swapaxes(-1, -2)
        outs.append((state @ q).squeeze(-1))
    return mx.stack(outs, axis=1), state


def state_before() -> mx.array:
    mx.random.seed(0)
    return mx.random.normal((ROWS, HEADS, VALUE_DIM, KEY_DIM))


def agree(found: mx.array, expected: mx.array) -> bool:
    return close(found, expected, on_cpu=1e-5 * float(mx.abs(expected).max()))


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("length", [1, 2, 5, 63, 64, 65, 200])
def test_chunks_compute_what_single_tokens_do(length: int, delta: bool) -> None:
    tokens = random_tokens(length, delta=delta)
    for got, expected in zip(
        scan(tokens, state_before()), token_by_token(tokens, state_before()), strict=True
    ):
        assert agree(got, expected)


def test_keys_that_are_all_the_same_cost_no_digits() -> None:
    """The matrix of the chunk's system is then all ones: its powers explode, its inverse does not."""
    tokens = random_tokens(150)
    tokens = replace(
        tokens,
        k=mx.broadcast_to(tokens.k[:, :1], tokens.k.shape),
        log_decay=mx.zeros_like(tokens.log_decay),
        beta=mx.ones((ROWS, 150, HEADS)),
    )
    for got, expected in zip(
        scan(tokens, state_before()), token_by_token(tokens, state_before()), strict=True
    ):
        assert agree(got, expected)


def test_a_state_that_fades_at_once_overflows_nowhere() -> None:
    tokens = random_tokens(100)
    tokens = replace(tokens, log_decay=tokens.log_decay - 50)
    for got, expected in zip(
        scan(tokens, state_before()), token_by_token(tokens, state_before()), strict=True
    ):
        assert agree(got, expected)


@pytest.mark.parametrize("delta", [True, False])
def test_tokens_past_a_row_s_length_leave_its_state(delta: bool) -> None:
    tokens, lengths = random_tokens(100, delta=delta), [0, 51]
    outs, state = scan(tokens.first(mx.array(lengths)), state_before())
    assert (state[0] == state_before()[0]).all()
    short = Tokens(
        *(x[:, :51] for x in (tokens.q, tokens.k, tokens.v, tokens.log_decay)),
        None if tokens.beta is None else tokens.beta[:, :51],
    )
    expected, after = token_by_token(short, state_before())
    assert agree(state[1], after[1])
    assert agree(outs[1, :51], expected[1])
