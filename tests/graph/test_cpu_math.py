"""Functions made of what a CPU vectorises, against the exact ones."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from emlxd.graph import cpu_math
from emlxd.graph.activations import ACTIVATIONS, make_activation
from tests.device import only_on_cpu

pytestmark = only_on_cpu("a GPU computes the exact functions")

POINTS = np.linspace(-12, 12, 20001, dtype=np.float32)


def test_erf() -> None:
    exact = [math.erf(point) for point in POINTS]
    np.testing.assert_allclose(np.array(cpu_math.erf(mx.array(POINTS))), exact, atol=6e-7)


def test_exp() -> None:
    exact = np.exp(POINTS.astype(np.float64))
    np.testing.assert_allclose(np.array(cpu_math.exp(mx.array(POINTS))), exact, rtol=2e-6)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_activations_are_the_same_in_either_form(name: str) -> None:
    plain = make_activation(name, gated=False, plain_cpu=True, compile=False)
    made, usual = (np.array(function(mx.array(POINTS))) for function in (plain, ACTIVATIONS[name]))
    np.testing.assert_allclose(made, usual, atol=4e-6)
