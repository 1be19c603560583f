"""Tokens in arrays that the host reads where they are."""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx

_THREADS: Final = 32


def in_pairs(tokens: mx.array, count: int) -> list[mx.array]:
    """The first ``count`` of int32 [n] in arrays int32 [2], the last one filled up with 0.

    MLX for CUDA has arrays of at most 8 bytes in memory that the host can read. A larger one is copied there
    when it is read, to memory allocated for it, which takes longer than to read all of these.
    """
    names = [f"pair_{n}" for n in range(-(-count // 2))]
    kernel: Any = mx.fast.cuda_kernel(
        name=f"emlxd_pairs_{count}",
        input_names=["tokens"],
        output_names=names,
        source=(
            f"int* const pairs[] = {{{', '.join(names)}}};\n"
            f"for (int i = threadIdx.x; i < {2 * len(names)}; i += {_THREADS})\n"
            f"  pairs[i / 2][i % 2] = i < {count} ? tokens[i] : 0;\n"
        ),
    )
    pairs: list[mx.array] = kernel(
        inputs=[tokens],
        grid=(_THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(2,)] * len(names),
        output_dtypes=[mx.int32] * len(names),
    )
    return pairs
