"""The non-linear functions of feed-forward layers, in a form that suits the device."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from emlxd.graph import cpu_math

Unary = Callable[[mx.array], mx.array]
Activation = Callable[..., mx.array]
"""``activation(gate, up)`` of a gated layer, ``activation(x)`` of a plain one."""

_SQRT_2: Final = math.sqrt(2)
_GELU: Final = math.sqrt(2 / math.pi)


@dataclass(frozen=True, slots=True)
class Functions:
    """What layers compute elementwise: ``activation`` in feed-forward ones, the others in recurrent ones.

    ``swiglu(gate, up)`` is silu(gate) * up; ``weigh(parts, weights)`` a sum of products, in float32.
    """

    activation: Activation
    silu: Unary
    swiglu: Activation
    exp: Unary
    weigh: Callable[[Sequence[mx.array], Sequence[mx.array]], mx.array]


def make_activation(name: str, *, gated: bool, plain_cpu: bool, compile: bool) -> Activation:
    """The function ``name``; ``plain_cpu`` chooses forms made of operations that a CPU vectorises."""
    activation = _gated(name, plain_cpu) if gated else _unary(name, plain_cpu)
    if not compile:
        return activation
    return mx.compile(activation) if plain_cpu else mx.compile(activation, shapeless=True)


def _gated(name: str, plain_cpu: bool) -> Activation:
    if name == "swiglu_clipped":
        return _swiglu_clipped
    unary = _unary(name, plain_cpu)
    return lambda gate, up: unary(gate) * up


def _unary(name: str, plain_cpu: bool) -> Unary:
    return _ON_CPU[name] if plain_cpu and name in _ON_CPU else ACTIVATIONS[name]


def weigh(parts: Sequence[mx.array], weights: Sequence[mx.array]) -> mx.array:
    """The sum of part times weight, float32."""
    products = (part.astype(mx.float32) * weight for part, weight in zip(parts, weights, strict=True))
    return functools.reduce(operator.add, products)


def _silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def _gelu(x: mx.array) -> mx.array:
    return x * (1 + mx.erf(x / _SQRT_2)) / 2


def _gelu_tanh(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.tanh(_GELU * (x + 0.044715 * x**3)))


def _relu2(x: mx.array) -> mx.array:
    return mx.square(mx.maximum(x, 0))


def _swiglu_clipped(gate: mx.array, up: mx.array) -> mx.array:
    """gpt-oss: both are clipped, the gate from above only, and the linear part is shifted by 1."""
    gate, up = mx.minimum(gate, 7.0), mx.clip(up, -7.0, 7.0)
    return gate * mx.sigmoid(1.702 * gate) * (up + 1)


def _cpu_silu(x: mx.array) -> mx.array:
    return x * cpu_math.sigmoid(x)


def _cpu_gelu(x: mx.array) -> mx.array:
    return x * (1 + cpu_math.erf(x / _SQRT_2)) / 2


def _cpu_gelu_tanh(x: mx.array) -> mx.array:
    # (1 + tanh(z)) / 2 is sigmoid(2 z)
    return x * cpu_math.sigmoid(2 * _GELU * (x + 0.044715 * x * x * x))


ACTIVATIONS: Final[Mapping[str, Unary]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
}
_ON_CPU: Final[Mapping[str, Unary]] = {"silu": _cpu_silu, "gelu": _cpu_gelu, "gelu_tanh": _cpu_gelu_tanh}
