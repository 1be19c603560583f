"""Every test computes on the device that ``EMLXD_TEST_DEVICE`` names.

MLX gets its fast BLAS if ``emlxd.graph`` is imported first, whichever test comes first. Hypothesis' limit on
the time of an example is off: a slow machine is no fault.
"""

import pytest
from hypothesis import settings

import emlxd.graph  # noqa: F401
from tests import device

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


def pytest_configure() -> None:
    try:
        device.use()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_report_header() -> str:
    return f"MLX's device: {device.current()}"
