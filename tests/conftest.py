"""MLX gets its fast BLAS if ``emlxd.graph`` is imported first, whichever test comes first.

Hypothesis' limit on the time of an example is off: a slow machine is no fault.
"""

from hypothesis import settings

import emlxd.graph  # noqa: F401

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
