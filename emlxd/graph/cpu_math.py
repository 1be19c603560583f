"""Elementary functions for the CPU backend, whose own ``exp`` handles one number at a time."""

from __future__ import annotations

from typing import Final

import mlx.core as mx

_LOG2_E: Final = 1.4426950408889634
_ROUND: Final = 12582912.0  # 1.5 * 2^23: adding it leaves no room for a fraction in a float32
_COEFFICIENTS: Final = (
    1.5403530e-4,
    1.33335581e-3,
    9.61812911e-3,
    5.55041087e-2,
    2.40226507e-1,
    6.93147181e-1,
    1.0,
)
_ERF_ABOVE: Final = (
    1.921713457e-8,
    -1.990313853e-6,
    1.555361061e-4,
    4.2930346e-3,
    5.243342666e-2,
    2.13944336e-1,
    1.128378677,
)
_ERF_BELOW: Final = (1.098032615e-3, 1.555106038e-2, 1.20799476e-1, 5.22930888e-1, 1.0)


def exp(x: mx.array) -> mx.array:
    """e^x of float32, x <= 88, to 3e-7 relative: only sums, products and shifts, which compilers vectorise.

    2^(n + f) with n whole and |f| <= 1/2: a Taylor polynomial for 2^f, n goes into the exponent bits.
    """
    t = mx.maximum(x * _LOG2_E, -126.0)
    n = (t + _ROUND) - _ROUND
    f = t - n
    power = mx.array(_COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        power = power * f + coefficient
    return power * mx.view((n.astype(mx.int32) + 127) << 23, mx.float32)


def erf(x: mx.array) -> mx.array:
    """The error function of float32, to 6e-7: x times a quotient of polynomials in x^2, fitted up to 4."""
    x = mx.minimum(mx.maximum(x, -4.0), 4.0)
    square = x * x
    above, below = mx.array(_ERF_ABOVE[0]), mx.array(_ERF_BELOW[0])
    for coefficient in _ERF_ABOVE[1:]:
        above = above * square + coefficient
    for coefficient in _ERF_BELOW[1:]:
        below = below * square + coefficient
    return x * above / below


def sigmoid(x: mx.array) -> mx.array:
    return 1.0 / (1.0 + exp(mx.minimum(-x, 88.0)))
