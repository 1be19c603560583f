"""What the tests compute on: ``EMLXD_TEST_DEVICE`` is ``cpu``, which is the default, or ``gpu``.

MLX has one default device for all threads of a process, so it is set once, before the first test. The daemons
that tests start set it too: run as a program this is ``emlxd`` on that device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final

from emlxd.graph import BLAS  # noqa: F401  before MLX, which else keeps its own

import mlx.core as mx  # isort: skip
import pytest  # isort: skip

VARIABLE: Final = "EMLXD_TEST_DEVICE"
DEVICES: Final = {"cpu": mx.cpu, "gpu": mx.gpu}


def chosen(environ: Mapping[str, str] = os.environ) -> str:
    """``cpu`` or ``gpu``. Raises ValueError for another name, and for a GPU where MLX has none."""
    name = environ.get(VARIABLE) or "cpu"
    if name not in DEVICES:
        raise ValueError(f"{VARIABLE} is {name!r}, expected {' or '.join(DEVICES)}")
    if not mx.is_available(DEVICES[name]):
        raise ValueError(
            f"{VARIABLE} is {name}, but this MLX finds no GPU: that takes Metal, or MLX for CUDA and a driver"
        )
    return name


def use(environ: Mapping[str, str] = os.environ) -> None:
    """Makes the device MLX's default in every thread. Raises ValueError as ``chosen`` does.

    float32 is then float32: CUDA's products would take their factors as TF32, which is so coarse that a token
    may get other experts.
    """
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    mx.set_default_device(DEVICES[chosen(environ)])


def current() -> str:
    """``cpu`` or ``gpu``: where MLX computes now."""
    return "cpu" if mx.default_device() == mx.cpu else "gpu"


def only_on_cpu(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(current() != "cpu", reason=f"on a CPU only: {reason}")


if __name__ == "__main__":
    from emlxd.cli import main

    try:
        use()
    except ValueError as problem:
        sys.exit(str(problem))
    main()
