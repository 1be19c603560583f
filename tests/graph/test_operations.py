"""What counts as an operation of a graph."""

from __future__ import annotations

import mlx.core as mx

from emlxd.graph.operations import counted_operations, operations


def test_views_are_none_and_what_is_fused_is_one() -> None:
    x = mx.ones((4, 4))
    mx.eval(x)
    assert operations([x]) == 0
    assert operations([(x @ x).T.reshape(16)[2:]]) == 1
    assert operations([mx.exp(x) + 1, mx.sin(x)]) == 3
    assert operations([mx.compile(lambda x: mx.exp(x) + 1)(x)]) == 1


def test_each_dispatch_is_counted_until_the_block_ends() -> None:
    x = mx.ones((4, 4))
    mx.eval(x)
    with counted_operations() as counts:
        y = mx.exp(x)
        mx.async_eval(y)  # type: ignore[no-untyped-call]
        mx.async_eval([mx.sin(y), {"z": y * y}])  # type: ignore[no-untyped-call]
    mx.async_eval(y + 1)  # type: ignore[no-untyped-call]
    assert counts == [1, 2]
